// python.hpp - helpers for Python's C API.
#ifndef SWAPKIT_PYTHON_HPP
#define SWAPKIT_PYTHON_HPP

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "python/assertions.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
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

// Holds the GIL, on any thread: torch calls from its own threads, and may have released the GIL.
class WithPython {
  public:
    WithPython() : state_(PyGILState_Ensure()) {}
    ~WithPython() { PyGILState_Release(state_); }
    WithPython(const WithPython &) = delete;
    WithPython &operator=(const WithPython &) = delete;

  private:
    PyGILState_STATE state_;
};

// Releases the GIL, so that other threads can run Python.
class WithoutPython {
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
    WithoutPython(const WithoutPython &) = delete;
    WithoutPython &operator=(const WithoutPython &) = delete;

  private:
    PyThreadState *state_;
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

// Return whether an attribute is true. -1: an exception is set.
template <Text name> int is_true(PyObject *object) {
    Ref<> value = attribute<name>(object);
    return value ? PyObject_IsTrue(value.get()) : -1;
}

// Call a method and return its result; none: it raised.
template <Text name, class... Args> Ref<> call_method(PyObject *object, Args... args) {
    PyObject *stack[] = {nullptr, object, args...};
    std::size_t count = sizeof...(args) + 1;
    return Ref<>::steal(PyObject_VectorcallMethod(interned<name>(), stack + 1,
                                                  count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

} // namespace swapkit

#endif
