// operators.cpp - the clock of operators: autograd's nodes, as they are made and as they run back.
//
// An operator is an autograd node, and its number the node's sequence number: counted per thread,
// rising through forward, and falling through backward, whichever thread that runs on. Whoever
// wants to act at an operator sets an alarm; torch's observers call in at every operator, compare
// two numbers, and only an alarm that is due reaches Python. Backward passes also leave a record of
// the order in which their nodes ran: nodes of branches that get no gradient do not run at all.
#include "operators.hpp"

#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

constexpr std::size_t clocks_count = 64; // more threads than that share alarms: no harm done
constexpr std::size_t record_limit = 1 << 20;
constexpr std::int64_t never_forward = INT64_MAX;
constexpr std::int64_t never_backward = -1;

struct Clock {
    std::atomic<std::int64_t> forward{never_forward};   // rings from this number on
    std::atomic<std::int64_t> backward{never_backward}; // rings from this number down
    std::atomic<std::int64_t> latest{-1};               // of backward
    std::mutex lock;
    std::vector<std::int64_t> record; // of the backward pass under way, or the last one
};

std::array<Clock, clocks_count> clocks;
thread_local int own_operators = 0;
at::CallbackHandle handle = 0; // of our observer; 0: there is none
PyObject *listener = nullptr;  // guarded by the interpreter, like the handle

Clock &clock_of(std::uint64_t thread) { return clocks[thread % clocks_count]; }

struct Alarm {
    Clock *clock;
    std::int64_t number;
};

// False: an exception is set.
bool read_alarm(PyObject *const *args, Py_ssize_t count, Alarm *out) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "a thread and a number are needed");
        return false;
    }
    out->clock = &clock_of(PyLong_AsUnsignedLongLong(args[0]));
    out->number = PyLong_AsLongLong(args[1]);
    return PyErr_Occurred() == nullptr;
}

// Below C++ frames of torch: nothing may be raised through them, and the listener sees to that.
void ring_now(std::uint64_t thread, std::int64_t number, int phase) {
    if (Py_IsInitialized() == 0) {
        return;
    }
    PyGILState_STATE state = PyGILState_Ensure();
    if (listener != nullptr) {
        Ref<> call = Ref<>::share(listener);
        Ref<> done = Ref<>::steal(PyObject_CallFunction(call.get(), "KLi",
                                                        static_cast<unsigned long long>(thread),
                                                        static_cast<long long>(number), phase));
        if (!done) {
            PyErr_WriteUnraisable(call.get());
        }
    }
    PyGILState_Release(state);
}

void see_backward(const at::RecordFunction &operation) {
    std::int64_t number = operation.seqNr();
    if (number < 0) {
        return; // accumulates a gradient: no operator of the forward pass
    }
    std::uint64_t thread = operation.forwardThreadId();
    Clock &clock = clock_of(thread);
    bool is_start = number > clock.latest.exchange(number, std::memory_order_relaxed);
    if (is_start || number <= clock.backward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, is_start ? 1 : 0);
    }
    std::lock_guard<std::mutex> guard(clock.lock);
    if (is_start) {
        clock.record.clear();
    }
    if (clock.record.size() < record_limit) {
        clock.record.push_back(number);
    }
}

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction &operation) {
    if (operation.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        see_backward(operation);
        return nullptr;
    }
    std::int64_t number = operation.seqNr();
    std::uint64_t thread = operation.threadId();
    if (own_operators > 0) {
        return nullptr;
    }
    if (number >= clock_of(thread).forward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, -1);
    }
    return nullptr;
}

// ---- for Python ---------------------------------------------------------------------------------

// clock_start(call): call `call(thread, number, phase)` when an alarm is due: phase -1 in forward,
// 0 in backward, 1 at the first operator of a backward pass, whatever its alarm says.
PyObject *start(PyObject *, PyObject *call) {
    Py_XSETREF(listener, Py_NewRef(call));
    if (handle == 0) {
        handle = at::addGlobalCallback(at::RecordFunctionCallback(&see).scopes(
            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    }
    Py_RETURN_NONE;
}

PyObject *stop(PyObject *, PyObject *) {
    if (handle != 0) {
        at::removeCallback(std::exchange(handle, 0));
    }
    Py_CLEAR(listener);
    Py_RETURN_NONE;
}

// clock_thread(): the thread whose operators are counted where this is called.
PyObject *thread_now(PyObject *, PyObject *) {
    return PyLong_FromUnsignedLongLong(at::RecordFunction::currentThreadId());
}

// clock_forward(thread, number): ring from `number` on in forward; never if it is negative.
PyObject *set_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
    Alarm alarm;
    if (!read_alarm(args, count, &alarm)) {
        return nullptr;
    }
    alarm.clock->forward.store(alarm.number < 0 ? never_forward : alarm.number);
    Py_RETURN_NONE;
}

// clock_backward(thread, number): ring from `number` down in backward; never if it is negative.
PyObject *set_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
    Alarm alarm;
    if (!read_alarm(args, count, &alarm)) {
        return nullptr;
    }
    alarm.clock->backward.store(alarm.number);
    Py_RETURN_NONE;
}

// clock_record(thread): the numbers of the latest backward pass, in the order in which it ran them.
PyObject *read_record(PyObject *, PyObject *argument) {
    unsigned long long thread = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    std::vector<std::int64_t> record;
    {
        Clock &clock = clock_of(thread);
        std::lock_guard<std::mutex> guard(clock.lock);
        record = clock.record;
    }
    PyObject *list = PyList_New(static_cast<Py_ssize_t>(record.size()));
    for (std::size_t i = 0; list != nullptr && i < record.size(); i++) {
        PyObject *number = PyLong_FromLongLong(record[i]);
        if (number == nullptr) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
        }
    }
    return list;
}

} // namespace

OwnOperators::OwnOperators() { own_operators++; }

OwnOperators::~OwnOperators() {
    own_operators--;
    SWAPKIT_ASSERT(own_operators >= 0);
}

PyMethodDef clock_functions[] = {
    {"clock_start", start, METH_O, nullptr},
    {"clock_stop", stop, METH_NOARGS, nullptr},
    {"clock_thread", thread_now, METH_NOARGS, nullptr},
    {"clock_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(set_forward)),
     METH_FASTCALL, nullptr},
    {"clock_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(set_backward)),
     METH_FASTCALL, nullptr},
    {"clock_record", read_record, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
