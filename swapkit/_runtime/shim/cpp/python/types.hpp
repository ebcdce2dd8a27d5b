// types.hpp - Python's types, methods and functions, made of C++ classes and functions.
//
// Python's arguments are read as what a C++ function takes (`Argument`), and its result is given to
// Python by its kind (`give`): as elsewhere, false (bool), -1 (int) and null mean that an exception
// is set. C++ exceptions become Python exceptions.
//
// Types and functions are made when the library is loaded, and PyInit__shim adds them all to the
// module.
#ifndef SWAPKIT_TYPES_HPP
#define SWAPKIT_TYPES_HPP

#include "python/python.hpp"

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace swapkit {

// Hidden: a process may load two builds of the shim, which must not share what is here.

// What the module will have. Never destroyed.
template <class Part> [[gnu::visibility("hidden")]] std::vector<Part> &module_parts() {
    static auto &parts = *new std::vector<Part>;
    return parts;
}

// The Python type of a C++ class, whose first field is `PyObject ob_base`.
template <class Body> [[gnu::visibility("hidden")]] inline PyTypeObject *python_type = nullptr;

// Return a new object, all of whose bytes are 0; none: an exception is set.
template <class Body> Ref<Body> allocate() {
    PyTypeObject *type = python_type<Body>;
    return Ref<Body>::steal(reinterpret_cast<Body *>(type->tp_alloc(type, 0)));
}

// ---- arguments and results ----------------------------------------------------------------------

inline bool is_of_type(PyObject *object, PyTypeObject *type) {
    if (PyObject_TypeCheck(object, type) == 0) {
        PyErr_Format(PyExc_TypeError, "expected a %s, not %R", _PyType_Name(type), object);
        return false;
    }
    return true;
}

// How a value is read. False: an exception is set.
template <class Value> struct Argument {
    static bool read(PyObject *given, Value *out) {
        if constexpr (std::is_same_v<Value, bool>) {
            int truth = PyObject_IsTrue(given);
            *out = truth == 1;
            return truth >= 0;
        } else if constexpr (std::unsigned_integral<Value>) {
            unsigned long long number = PyLong_AsUnsignedLongLong(given);
            return fits(number, out);
        } else if constexpr (std::signed_integral<Value>) {
            return fits(PyLong_AsLongLong(given), out);
        } else { // an object of a type of the shim
            *out = reinterpret_cast<Value>(given);
            return is_of_type(given, python_type<std::remove_pointer_t<Value>>);
        }
    }

    template <class Number> static bool fits(Number number, Value *out) {
        *out = static_cast<Value>(number);
        if (PyErr_Occurred() == nullptr && !std::in_range<Value>(number)) {
            PyErr_SetString(PyExc_OverflowError, "a number is too large");
        }
        return PyErr_Occurred() == nullptr;
    }
};

template <> struct Argument<PyObject *> {
    static bool read(PyObject *given, PyObject **out) {
        *out = given;
        return true;
    }
};

template <> struct Argument<const char *> {
    static bool read(PyObject *given, const char **out) {
        *out = PyUnicode_AsUTF8(given);
        return *out != nullptr;
    }
};

// An object of one of Python's types.
template <PyTypeObject *type> struct Of {
    PyObject *object = nullptr;
};
template <PyTypeObject *type> struct Argument<Of<type>> {
    static bool read(PyObject *given, Of<type> *out) {
        out->object = given;
        return is_of_type(given, type);
    }
};

// The bytes of an object, for as long as a function runs.
struct Bytes : Py_buffer, Unmovable {
    Bytes() : Py_buffer{} {}
    ~Bytes() { PyBuffer_Release(this); }

    // Read a table that Python has built, of rows of 64-bit numbers. False: an exception is set.
    template <class Row> bool read_rows(std::vector<Row> *out) const {
        static_assert(sizeof(Row) % sizeof(std::int64_t) == 0);
        auto length = static_cast<std::size_t>(len);
        if (length % sizeof(Row) != 0) {
            PyErr_SetString(PyExc_ValueError, "a table has an incomplete row");
            return false;
        }
        out->resize(length / sizeof(Row));
        if (length > 0) {
            std::memcpy(out->data(), buf, length);
        }
        return true;
    }
};
template <> struct Argument<Bytes> {
    static bool read(PyObject *given, Bytes *out) {
        return PyObject_GetBuffer(given, out, PyBUF_SIMPLE) == 0;
    }
};

// The items that a sequence has now.
struct Items {
    Ref<> sequence;
    PyObject *const *begin() const {
        return reinterpret_cast<PyTupleObject *>(sequence.get())->ob_item;
    }
    PyObject *const *end() const { return begin() + PyTuple_GET_SIZE(sequence.get()); }
};
template <> struct Argument<Items> {
    static bool read(PyObject *given, Items *out) {
        auto fast = Ref<>::steal(PySequence_Fast(given, "expected a sequence of tensors"));
        out->sequence = Ref<>::steal(fast ? PySequence_Tuple(fast.get()) : nullptr);
        return static_cast<bool>(out->sequence);
    }
};

// Of `__exit__`: any arguments, which do not matter.
struct Unread {};
template <> struct Argument<Unread> {
    static bool read(PyObject *, Unread *) { return true; }
};

inline PyObject *give(bool is_done) { return is_done ? Py_NewRef(Py_None) : nullptr; }
inline PyObject *give(int truth) { return truth < 0 ? nullptr : PyBool_FromLong(truth); }
template <std::unsigned_integral Number> PyObject *give(Number number) {
    return PyLong_FromUnsignedLongLong(number);
}
template <class Enum>
    requires std::is_enum_v<Enum>
PyObject *give(Enum number) {
    return PyLong_FromLong(static_cast<long>(number));
}
template <class Object> PyObject *give(Object *object) { return as_object(object); }
template <class Object> PyObject *give(Ref<Object> object) { return as_object(object.release()); }

// Call a function with what Python has given, and with objects that come first.
template <auto function, class... Args, class... First, std::size_t... at>
PyObject *call_read(PyObject *const *given, std::index_sequence<at...>, First... first) {
    [[maybe_unused]] std::tuple<std::remove_cvref_t<Args>...> values;
    if (!(Argument<std::remove_cvref_t<Args>>::read(given[at], &std::get<at>(values)) && ...)) {
        return nullptr;
    }
    if constexpr (std::is_void_v<decltype(function(first..., std::get<at>(values)...))>) {
        function(first..., std::get<at>(values)...);
        return Py_NewRef(Py_None);
    } else {
        return give(function(first..., std::get<at>(values)...));
    }
}

// Call a function with a tuple of arguments.
template <auto function, class... Args, class... First>
PyObject *call_with(const char *name, PyObject *args, First... first) {
    if (PyTuple_GET_SIZE(args) != sizeof...(Args)) {
        return PyErr_Format(PyExc_TypeError, "%s() takes exactly %zu arguments (%zd given)", name,
                            sizeof...(Args), PyTuple_GET_SIZE(args));
    }
    return call_read<function, Args...>(reinterpret_cast<PyTupleObject *>(args)->ob_item,
                                        std::index_sequence_for<Args...>(), first...);
}

// ---- functions and methods ----------------------------------------------------------------------

// A function as Python calls it; `Self`: what a method is called on.
template <Text name, auto function, class... Self> struct Called {
    template <class... Args> static PyObject *call(PyObject *self, PyObject *given) {
        if constexpr (sizeof...(Args) <= 1) {
            return call_read<function, Args...>(&given, std::index_sequence_for<Args...>(),
                                                reinterpret_cast<Self>(self)...);
        } else {
            return call_with<function, Args...>(name.text, given, reinterpret_cast<Self>(self)...);
        }
    }

    template <class Result, class... Args>
    static constexpr PyMethodDef made(Result (*)(Self..., Args...), const char *doc) {
        constexpr int flags[] = {METH_NOARGS, METH_O, METH_VARARGS};
        return {name.text, shielded<call<Args...>>, flags[std::min<int>(sizeof...(Args), 2)], doc};
    }
    template <class Result>
    static constexpr PyMethodDef made(Result (*)(Self..., Unread), const char *doc) {
        return {name.text, shielded<call<Unread>>, METH_VARARGS, doc};
    }
};

template <class Result, class Self, class... Args> Self self_of(Result (*)(Self, Args...));

template <Text name, auto function> constexpr PyMethodDef method(const char *doc = nullptr) {
    return Called<name, function, decltype(self_of(+function))>::made(+function, doc);
}
template <Text name, auto function>
constexpr PyMethodDef module_function(const char *doc = nullptr) {
    return Called<name, function>::made(+function, doc);
}

// Adds functions to the module.
struct Functions {
    Functions(std::initializer_list<PyMethodDef> functions) {
        auto &all = module_parts<PyMethodDef>();
        all.insert(all.end(), functions);
    }
};

// ---- fields and properties ----------------------------------------------------------------------

template <class Value> constexpr int field_kind() {
    if constexpr (std::is_same_v<Value, char> || std::is_same_v<Value, bool>) {
        return T_BOOL;
    } else if constexpr (std::unsigned_integral<Value>) {
        return sizeof(Value) == sizeof(unsigned) ? T_UINT : T_ULONGLONG;
    } else {
        return std::is_pointer_v<Value> ? T_OBJECT : T_LONGLONG;
    }
}

template <class Body, class Value> Py_ssize_t offset_of(Value Body::*member) {
    Py_ssize_t offset; // which is what a pointer to a member is, by the ABI
    static_assert(sizeof(offset) == sizeof(member));
    std::memcpy(&offset, &member, sizeof(offset));
    return offset;
}

// A field that Python cannot set. `within`: it is a part of that field.
template <class Body, class Value>
PyMemberDef field(const char *name, Value Body::*member, Py_ssize_t within = 0) {
    return {name, field_kind<Value>(), within + offset_of(member), READONLY, nullptr};
}
// One that it can.
template <class Body, class Value> PyMemberDef variable(const char *name, Value Body::*member) {
    return {name, field_kind<Value>(), offset_of(member), 0, nullptr};
}

template <auto get> PyObject *get_property(PyObject *self, PyObject *) {
    auto value = get(reinterpret_cast<decltype(self_of(+get))>(self));
    if constexpr (std::is_same_v<decltype(value), bool>) {
        return PyBool_FromLong(value);
    } else {
        return give(std::move(value));
    }
}

// `get` returns a value, of which bool is True or False.
template <auto get> constexpr PyGetSetDef property(const char *name, setter set = nullptr) {
    return {name, [](PyObject *self, void *) { return shielded<get_property<get>>(self, nullptr); },
            set, nullptr, nullptr};
}

// ---- types --------------------------------------------------------------------------------------

// What a type does besides: see those derived from it.
struct Slot {
    static constexpr bool is_collected = false;
    static void complete(PyTypeObject *) {}
    static void unlink(void *) {}
    static void release(void *) {}
    static void clear(void *) {}
    static int visit(void *, visitproc, void *) { return 0; }
};

// An object is made by a function that fills a new one: false: an exception is set. Reading the
// arguments may run Python, to which the collector would show a new object: there is none yet. A
// function with keywords is a `tp_new`. Without either, only C++ makes objects.
template <auto function> struct MadeBy : Slot {
    template <class Body, class... Args> static Ref<Body> fill(Args... args) {
        Ref<Body> made = allocate<Body>();
        return made && function(made.get(), args...) ? std::move(made) : Ref<Body>();
    }
    template <class Body, class... Args>
    static PyObject *read(const char *name, PyObject *args, bool (*)(Body *, Args...)) {
        return call_with<fill<Body, Args...>, Args...>(name, args);
    }
    static PyObject *filled(PyObject *type, PyObject *args) {
        return read(_PyType_Name(reinterpret_cast<PyTypeObject *>(type)), args, +function);
    }
    static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *) {
        return shielded<filled>(as_object(type), args);
    }
    static void complete(PyTypeObject *type) { type->tp_new = make; }
};
template <newfunc function> struct MadeByNew : Slot {
    static void complete(PyTypeObject *type) { type->tp_new = function; }
};

// Called when an object is freed: before its weak references are, whose callbacks may run Python,
template <auto function> struct Unlinked : Slot {
    static void unlink(auto *body) { function(body); }
};
// and after that.
template <auto function> struct Freed : Slot {
    static void release(auto *body) { function(body); }
};

// References of an object, which go when it is freed.
template <auto... members> struct Owned : Slot {
    static void release(auto *body) {
        (Py_XDECREF(as_object(std::exchange(body->*members, nullptr))), ...);
    }
};
// The collector sees these,
template <auto... members> struct Visited : Owned<members...> {
    static constexpr bool is_collected = true;
    static int visit(auto *body, visitproc visit, void *arg) {
        int status = 0;
        auto see = [&](void *each) {
            status = each == nullptr ? 0 : visit(as_object(each), arg);
            return status == 0;
        };
        (void)(see(body->*members) && ...);
        return status;
    }
};
// and drops these.
template <auto... members> struct Cleared : Visited<members...> {
    static void clear(auto *body) { Owned<members...>::release(body); }
};

// A class and the slots of its type.
template <class Body, class... Slots> struct Life {
    static constexpr bool is_collected = (Slots::is_collected || ...);

    static void free(PyObject *self) {
        auto *body = reinterpret_cast<Body *>(self);
        if constexpr (is_collected) {
            PyObject_GC_UnTrack(self);
        }
        (Slots::unlink(body), ...);
        if constexpr (requires { body->weakrefs; }) {
            if (body->weakrefs != nullptr) {
                PyObject_ClearWeakRefs(self);
            }
        }
        (Slots::release(body), ...);
        Py_TYPE(self)->tp_free(self);
    }
    static int traverse(PyObject *self, visitproc visit, void *arg) {
        int status = 0;
        (void)(((status = Slots::visit(reinterpret_cast<Body *>(self), visit, arg)) == 0) && ...);
        return status;
    }
    static int clear(PyObject *self) {
        (Slots::clear(reinterpret_cast<Body *>(self)), ...);
        return 0;
    }
};

inline const char *full_name(const char *name) {
    return (new std::string(std::string("swapkit._runtime._shim.") + name))->c_str();
}

// A table of the parts of one kind, as Python wants it.
template <class Part, class... Parts> Part *table_of(const Parts &...parts) {
    auto &table = *new std::vector<Part>; // Python keeps it
    auto add = [&](const auto &part) {
        if constexpr (std::is_same_v<decltype(part), const Part &>) {
            table.push_back(part);
        }
    };
    (add(parts), ...);
    table.push_back({});
    return table.data();
}

// A type of the module, with methods, fields and properties.
struct Type : PyTypeObject {
    template <class Body, class... Slots, class... Parts>
    Type(Life<Body, Slots...> life, const char *name, const char *doc, const Parts &...parts)
        : PyTypeObject{.ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = full_name(name),
                       .tp_basicsize = sizeof(Body),
                       .tp_dealloc = life.free,
                       .tp_flags = Py_TPFLAGS_DEFAULT,
                       .tp_doc = doc,
                       .tp_methods = table_of<PyMethodDef>(parts...),
                       .tp_members = table_of<PyMemberDef>(parts...),
                       .tp_getset = table_of<PyGetSetDef>(parts...)} {
        (Slots::complete(this), ...);
        if constexpr (requires { &Body::weakrefs; }) {
            tp_weaklistoffset = offset_of(&Body::weakrefs);
        }
        if (life.is_collected) {
            tp_flags |= Py_TPFLAGS_HAVE_GC;
            tp_traverse = life.traverse;
            tp_clear = life.clear;
        }
        tp_flags |= tp_new == nullptr ? Py_TPFLAGS_DISALLOW_INSTANTIATION : 0UL;
        python_type<Body> = this;
        module_parts<PyTypeObject *>().push_back(this);
    }
    // A subclass that only adds what a class is as a number.
    Type(PyTypeObject *base, PyNumberMethods *number, const char *name, const char *doc)
        : PyTypeObject{.ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = full_name(name),
                       .tp_as_number = number,
                       .tp_flags = Py_TPFLAGS_DEFAULT,
                       .tp_doc = doc,
                       .tp_base = base} {
        module_parts<PyTypeObject *>().push_back(this);
    }
};

} // namespace swapkit

#endif
