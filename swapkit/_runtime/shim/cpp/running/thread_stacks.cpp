// thread_stacks.cpp - reading the stacks of other threads.
//
// Up to Python 3.11, making a frame object may start the garbage collector, whose finalizers let
// other threads run: the frame may be gone once its object is made. So the collector is off here,
// all frames are read in one go, and no frame object is returned. Any thread that holds the GIL may
// call what is here; none of it releases the GIL or takes a lock.
#include "python/types.hpp"

#include <frameobject.h>

#include <utility>

namespace swapkit {

namespace {

class WithoutCollector : Unmovable {
  public:
    WithoutCollector() : was_enabled_(PyGC_Disable() != 0) {}
    ~WithoutCollector() {
        if (was_enabled_) {
            (void)PyGC_Enable();
        }
    }

  private:
    bool was_enabled_;
};

// Return the innermost frames of all threads, by thread id; none: an exception is set.
Ref<> innermost_frames() {
    PyObject *current_frames = PySys_GetObject("_current_frames");
    if (current_frames == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this Python has no sys._current_frames");
        return {};
    }
    return Ref<>::steal(PyObject_CallNoArgs(current_frames));
}

// Call `see` with a frame and then its callers, until it returns false: an exception is set.
template <class See> bool walk(PyObject *innermost, See &&see) {
    auto frame = Ref<PyFrameObject>::share(reinterpret_cast<PyFrameObject *>(innermost));
    while (frame) {
        if (!see(frame.get())) {
            return false;
        }
        frame = Ref<PyFrameObject>::steal(PyFrame_GetBack(frame.get()));
    }
    return true;
}

bool append(PyObject *list, Ref<> item) { return item && PyList_Append(list, item.get()) == 0; }

Ref<> code_of(PyFrameObject *frame) { return Ref<>::steal(as_object(PyFrame_GetCode(frame))); }

Ref<> stack_of(PyObject *innermost) {
    Ref<> stack = Ref<>::steal(PyList_New(0));
    bool is_read =
        stack && walk(innermost, [&](PyFrameObject *frame) {
            Ref<> code = code_of(frame);
            Ref<> globals = attribute<"f_globals">(as_object(frame));
            return globals &&
                   append(stack.get(), Ref<>::steal(PyTuple_Pack(2, code.get(), globals.get())));
        });
    return is_read ? std::move(stack) : Ref<>();
}

// stacks() -> for each other thread, the (code, globals) of its frames, innermost first.
PyObject *stacks() {
    WithoutCollector guard;
    Ref<> frames = innermost_frames();
    Ref<> own = Ref<>::steal(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    Ref<> found = Ref<>::steal(PyList_New(0));
    if (!frames || !own || !found) {
        return nullptr;
    }
    PyObject *thread, *innermost;
    for (Py_ssize_t at = 0; PyDict_Next(frames.get(), &at, &thread, &innermost) != 0;) {
        int is_own = PyObject_RichCompareBool(thread, own.get(), Py_EQ);
        if (is_own < 0 || (is_own == 0 && !append(found.get(), stack_of(innermost)))) {
            return nullptr;
        }
    }
    return found.release();
}

// receivers(thread, code) -> `self` in each frame of a thread that runs `code`, innermost first.
PyObject *receivers(Of<&PyLong_Type> thread, Of<&PyCode_Type> code) {
    WithoutCollector guard;
    Ref<> frames = innermost_frames();
    Ref<> found = Ref<>::steal(PyList_New(0));
    if (!frames || !found) {
        return nullptr;
    }
    PyObject *innermost = PyDict_GetItemWithError(frames.get(), thread.object);
    bool is_read = walk(innermost, [&](PyFrameObject *frame) {
        if (code_of(frame).get() != code.object) {
            return true;
        }
        Ref<> locals = attribute<"f_locals">(as_object(frame));
        return locals && append(found.get(),
                                Ref<>::steal(PyObject_GetItem(locals.get(), interned<"self">())));
    });
    return is_read && PyErr_Occurred() == nullptr ? found.release() : nullptr;
}

const Functions stack_functions{module_function<"stacks", stacks>(),
                                module_function<"receivers", receivers>()};

} // namespace

} // namespace swapkit
