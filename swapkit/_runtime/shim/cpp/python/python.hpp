// python.hpp - helpers for Python's C API.
#ifndef SWAPKIT_PYTHON_HPP
#define SWAPKIT_PYTHON_HPP

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "python/assertions.hpp"

#include <unistd.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <new>
#include <type_traits>
#include <utility>

namespace swapkit {

// An owned reference to a Python object, or to none.
template <class Object = PyObject> class Ref {
  public:
    Ref() = default;
    static Ref steal(Object *object) { return Ref(object); }
    static Ref share(Object *object) {
        Py_XINCREF(reinterpret_cast<PyObject *>(object));
        return Ref(object);
    }
    Ref(Ref &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref &operator=(Ref &&other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(reinterpret_cast<PyObject *>(object_)); }

    explicit operator bool() const { return object_ != nullptr; }
    Object *get() const { return object_; }
    Object *operator->() const { return object_; }
    Object *release() { return std::exchange(object_, nullptr); }

  private:
    explicit Ref(Object *object) : object_(object) {}
    Object *object_ = nullptr;
};

// What stays where it was made.
struct Unmovable {
    Unmovable() = default;
    Unmovable(const Unmovable &) = delete;
    Unmovable &operator=(const Unmovable &) = delete;
};

// Gives a variable another value while it lives.
template <class Value> class Meanwhile : Unmovable {
  public:
    Meanwhile(Value &place, Value value)
        : place_(place), former_(std::exchange(place, std::move(value))) {}
    ~Meanwhile() { place_ = former_; }

  private:
    Value &place_;
    Value former_;
};

// Holds the GIL, on any thread: torch calls from its own threads, and may have released the GIL.
class WithPython : Unmovable {
  public:
    WithPython() : state_(PyGILState_Ensure()) {}
    ~WithPython() { PyGILState_Release(state_); }

  private:
    PyGILState_STATE state_;
};

// Releases the GIL, so that other threads can run Python.
class WithoutPython : Unmovable {
  public:
    WithoutPython() : state_(PyEval_SaveThread()) {}
    ~WithoutPython() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            // Python is finalizing and unwinds this thread: the outer frames must not run.
            for (;;) {
                pause();
            }
        }
    }

  private:
    PyThreadState *state_;
};

// The current exception, put aside while it lives: destructors and hooks also run while one is set.
class PutAside : Unmovable {
  public:
    PutAside() { PyErr_Fetch(&type_, &value_, &trace_); }
    ~PutAside() { PyErr_Restore(type_, value_, trace_); }

  private:
    PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// For assertions: whether this thread holds the GIL.
inline bool has_python() { return PyGILState_Check() != 0; }

inline PyObject *as_object(void *object) { return static_cast<PyObject *>(object); }

// Turn the current C++ exception into a Python exception: its original one, or torch's translation.
void raise_current();

// A function that Python calls; its C++ exceptions become Python exceptions.
template <PyObject *(*function)(PyObject *, PyObject *)>
PyObject *shielded(PyObject *self, PyObject *argument) {
    try {
        return function(self, argument);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    } catch (const std::exception &) {
        raise_current();
        return nullptr;
    }
}

// A name literal; its Python string is made once.
template <std::size_t size> struct Text {
    char text[size];
    // NOLINTNEXTLINE(misc-explicit-constructor): a literal is written in its place
    constexpr Text(const char (&source)[size]) { std::copy_n(source, size, text); }
};
template <Text name> PyObject *interned() {
    static PyObject *const made = PyUnicode_InternFromString(name.text);
    return made;
}

// Return an attribute; none: an exception is set.
template <Text name> Ref<> attribute(PyObject *object) {
    return Ref<>::steal(PyObject_GetAttr(object, interned<name>()));
}

// Return whether a value is true. -1: there is none, an exception is set.
inline int is_true(const Ref<> &value) { return value ? PyObject_IsTrue(value.get()) : -1; }
template <Text name> int is_true(PyObject *object) { return is_true(attribute<name>(object)); }

// Return a number or an object for Python; none: an exception is set.
template <class Value> Ref<> for_python(Value value) {
    if constexpr (std::is_same_v<Value, bool>) {
        return Ref<>::steal(PyBool_FromLong(value));
    } else if constexpr (std::floating_point<Value>) {
        return Ref<>::steal(PyFloat_FromDouble(value));
    } else if constexpr (std::unsigned_integral<Value>) {
        return Ref<>::steal(PyLong_FromUnsignedLongLong(value));
    } else if constexpr (std::signed_integral<Value> || std::is_enum_v<Value>) {
        return Ref<>::steal(PyLong_FromLongLong(static_cast<long long>(value)));
    } else {
        return Ref<>::share(as_object(value));
    }
}

// Call with these arguments, of which the first is left to what is called. None: an exception is
// set, or there is nothing to call.
template <std::size_t size>
Ref<> call_given(vectorcallfunc how, PyObject *called, const Ref<> (&given)[size]) {
    PyObject *stack[size];
    std::transform(given, given + size, stack, [](const Ref<> &each) { return each.get(); });
    bool is_whole =
        called != nullptr && std::find(stack + 1, stack + size, nullptr) == stack + size;
    return Ref<>::steal(
        is_whole ? how(called, stack + 1, (size - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)
                 : nullptr);
}
// Call a function and return its result; none: it raised, or there is no function.
template <class... Args> Ref<> call(PyObject *function, Args... args) {
    return call_given(PyObject_Vectorcall, function, {Ref<>(), for_python(args)...});
}
// Likewise a method.
template <Text name, class... Args> Ref<> call_method(PyObject *object, Args... args) {
    return call_given(PyObject_VectorcallMethod, interned<name>(),
                      {Ref<>(), for_python(object), for_python(args)...});
}

// Return a list of what `make` returns for each item; none: an exception is set.
template <class Some, class Make> Ref<> list_of(const Some &some, Make make) {
    Ref<> list = Ref<>::steal(PyList_New(0));
    for (const auto &each : some) {
        Ref<> item = list ? make(each) : Ref<>();
        if (!item || PyList_Append(list.get(), item.get()) != 0) {
            return {};
        }
    }
    return list;
}

} // namespace swapkit

#endif
