// module.cpp - the shim as a Python module: movers, and the links to the core.
#include "memory/reclaimable.hpp"
#include "memory/streams.hpp"
#include "moves/plan_cursor.hpp"
#include "moves/prefetch.hpp"
#include "moves/write_behind.hpp"
#include "recompute/capturing.hpp"
#include "recompute/operator_choices.hpp"
#include "recompute/recomputed.hpp"
#include "recompute/regions.hpp"
#include "recompute/standby.hpp"
#include "running/announced_kernels.hpp"
#include "running/hidden_operators.hpp"
#include "running/hook_bypass.hpp"
#include "running/late_modes.hpp"
#include "running/profiler_range.hpp"
#include "running/thread_stacks.hpp"
#include "saved/storage_choices.hpp"
#include "saved/wrappers.hpp"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace swapkit {

Links links;

void assertion_failed(const char *condition, const char *file, int line) {
    (void)std::fprintf(stderr, "swapkit: %s:%d: assertion failed: %s\n", file, line, condition);
    std::abort();
}

bool raise_interruption() {
    if (PyList_GET_SIZE(links.interruptions) == 0) {
        return true;
    }
    return static_cast<bool>(Ref<>::steal(PyObject_CallNoArgs(links.raise_interruption)));
}

bool raises(sk_status status) {
    if (status == SK_OK) {
        return false;
    }
    Ref<> number = Ref<>::steal(PyLong_FromLong(status));
    Ref<> error =
        Ref<>::steal(number ? PyObject_CallOneArg(links.error_of, number.get()) : nullptr);
    if (error) {
        PyErr_SetObject(as_object(Py_TYPE(error.get())), error.get());
    }
    return true;
}

// ---- movers -------------------------------------------------------------------------------------

namespace {

Mover *as_mover(PyObject *self) { return reinterpret_cast<Mover *>(self); }

// Return a method's argument as a group of this mover; null: an exception is set.
Group *as_group(PyObject *self, PyObject *argument) {
    auto *group = reinterpret_cast<Group *>(argument);
    if (Py_TYPE(argument) != &group_type || group->mover != as_mover(self)) {
        PyErr_Format(PyExc_TypeError, "expected a StorageGroup of this mover, not %R", argument);
        return nullptr;
    }
    return group;
}

PyObject *truth(int value) { return value < 0 ? nullptr : PyBool_FromLong(value); }
PyObject *nothing(bool done) { return done ? Py_NewRef(Py_None) : nullptr; }

template <int (*move)(Mover *, Group *)> PyObject *try_move(PyObject *self, PyObject *argument) {
    Group *group = as_group(self, argument);
    return group == nullptr ? nullptr : truth(move(as_mover(self), group));
}

template <bool (*move)(Mover *, Group *)> PyObject *do_move(PyObject *self, PyObject *argument) {
    Group *group = as_group(self, argument);
    return group == nullptr ? nullptr : nothing(move(as_mover(self), group));
}

bool release_group(Mover *mover, Group *group) {
    if (group->native == nullptr) {
        PyErr_SetString(PyExc_ValueError, "cannot release a group without a copy");
        return false;
    }
    return release(mover, group);
}

PyObject *list_of(const BySerial &groups) {
    PyObject *list = PyList_New(0);
    for (auto each = groups.begin(); list != nullptr && each != groups.end(); ++each) {
        if (PyList_Append(list, as_object(each->second)) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *get_resident(PyObject *self, void *) { return list_of(as_mover(self)->books->resident); }
PyObject *get_out(PyObject *self, void *) { return list_of(as_mover(self)->books->agenda.out); }
PyObject *get_indexed(PyObject *self, void *) {
    return PyLong_FromSize_t(as_mover(self)->books->index.size());
}

PyObject *get_stalls(PyObject *self, void *) {
    Ref<> found = Ref<>::steal(PyDict_New());
    for (auto [site, seconds] : as_mover(self)->books->stalls) {
        Ref<> key = Ref<>::steal(Py_BuildValue("(II)", site.first, site.second));
        Ref<> value = Ref<>::steal(PyFloat_FromDouble(seconds));
        if (!found || !key || !value || PyDict_SetItem(found.get(), key.get(), value.get()) != 0) {
            return nullptr;
        }
    }
    return found.release();
}

PyObject *get_timed(PyObject *self, void *) { return timing_counts(as_mover(self)); }

PyObject *get_resident_count(PyObject *self, void *) {
    return PyLong_FromSize_t(as_mover(self)->books->resident.size());
}

PyObject *mover_release_done(PyObject *self, PyObject *is_end) {
    int ends = PyObject_IsTrue(is_end);
    return nothing(ends >= 0 && agenda_attend(as_mover(self), ends == 1));
}

PyObject *mover_release_next(PyObject *self, PyObject *) {
    return truth(agenda_release_next(as_mover(self)));
}

PyObject *mover_copy_ahead(PyObject *self, PyObject *) {
    return nothing(behind_copy(as_mover(self)));
}

PyObject *mover_settle_ahead(PyObject *self, PyObject *) {
    return nothing(behind_settle(as_mover(self)));
}

PyObject *mover_resume_copies(PyObject *self, PyObject *) {
    return nothing(behind_resume(as_mover(self)));
}

PyObject *get_dirty_count(PyObject *self, void *) {
    return PyLong_FromSize_t(as_mover(self)->books->agenda.line(Line::ahead).size());
}

PyObject *mover_sweep_captured(PyObject *self, PyObject *) {
    return PyBool_FromLong(as_mover(self)->books->captured.sweep());
}

PyObject *mover_end_captures(PyObject *self, PyObject *) {
    Locked lock(as_mover(self));
    if (lock) {
        end_captures(as_mover(self));
    }
    return nothing(static_cast<bool>(lock));
}

PyObject *mover_forget_retained(PyObject *self, PyObject *) {
    Locked lock(as_mover(self));
    if (lock) {
        forget_retained(as_mover(self));
    }
    return nothing(static_cast<bool>(lock));
}

PyObject *mover_drop(PyObject *self, PyObject *args) {
    PyObject *argument, *digest;
    if (PyArg_ParseTuple(args, "OO:drop", &argument, &digest) == 0) {
        return nullptr;
    }
    Group *group = as_group(self, argument);
    return group == nullptr ? nullptr : PyBool_FromLong(drop_spare(as_mover(self), group, digest));
}

PyObject *mover_packer(PyObject *self, PyObject *placement) {
    return packer_new(as_mover(self), placement);
}

// Read an integer attribute; false: an exception is set.
bool read_number(PyObject *object, const char *name, unsigned long long *out) {
    Ref<> value = Ref<>::steal(PyObject_GetAttrString(object, name));
    *out = value ? PyLong_AsUnsignedLongLong(value.get()) : 0;
    return PyErr_Occurred() == nullptr;
}

PyObject *mover_make(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static const char *names[] = {"policy",      "scheduler",    "lock", "tracker",
                                  "device_type", "device_index", nullptr};
    PyObject *policy, *scheduler, *lock, *tracker;
    int device_type, device_index;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "$OOO!Oii:Mover", const_cast<char **>(names),
                                    &policy, &scheduler, &lock_type, &lock, &tracker, &device_type,
                                    &device_index) == 0) {
        return nullptr;
    }
    unsigned long long sched, has_disk;
    Ref<> made = Ref<>::steal(type->tp_alloc(type, 0));
    if (!made || !read_number(scheduler, "address", &sched) ||
        !read_number(scheduler, "has_disk", &has_disk)) {
        return nullptr;
    }
    Mover *mover = as_mover(made.get());
    mover->policy = Py_NewRef(policy);
    mover->scheduler = Py_NewRef(scheduler);
    mover->lock = reinterpret_cast<Lock *>(Py_NewRef(lock));
    mover->tracker = Py_NewRef(tracker);
    mover->sched = reinterpret_cast<sk_sched *>(sched);
    mover->device_type = static_cast<c10::DeviceType>(device_type);
    mover->device_index = static_cast<c10::DeviceIndex>(device_index);
    mover->has_disk = static_cast<char>(has_disk);
    mover->watermark_bytes = mover->ahead_bytes = no_limit;
    mover->most_copying = 0;
    mover->books = new Books;
    mover_join(mover);
    return made.release();
}

PyObject *get_follower(PyObject *self, void *) {
    PyObject *follower = as_object(as_mover(self)->follower);
    return Py_NewRef(follower == nullptr ? Py_None : follower);
}

int set_follower(PyObject *self, PyObject *value, void *) {
    bool is_none = value == nullptr || value == Py_None;
    if (!is_none && Py_TYPE(value) != &follower_type) {
        PyErr_Format(PyExc_TypeError, "expected a Follower, not %R", value);
        return -1;
    }
    auto *follower = reinterpret_cast<Follower *>(is_none ? nullptr : Py_NewRef(value));
    Follower *former = std::exchange(as_mover(self)->follower, follower);
    if (former != nullptr) {
        follower_end(former);
    }
    Py_XDECREF(as_object(former));
    return 0;
}

int mover_traverse(PyObject *self, visitproc visit, void *arg) {
    Mover *mover = as_mover(self);
    Py_VISIT(as_object(mover->follower));
    Py_VISIT(mover->policy);
    Py_VISIT(mover->tracker);
    Py_VISIT(mover->scheduler);
    return 0;
}

int mover_clear(PyObject *self) {
    Mover *mover = as_mover(self);
    Py_XDECREF(as_object(std::exchange(mover->follower, nullptr)));
    Py_CLEAR(mover->policy);
    Py_CLEAR(mover->tracker);
    Py_CLEAR(mover->scheduler);
    return 0;
}

void mover_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    mover_part(as_mover(self));
    if (as_mover(self)->weakrefs != nullptr) {
        PyObject_ClearWeakRefs(self);
    }
    mover_clear(self);
    timing_end(as_mover(self));
    delete as_mover(self)->books;
    Py_XDECREF(as_object(as_mover(self)->lock));
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef mover_methods[] = {
    {"packer", mover_packer, METH_O, "Return the saved-tensor hooks of a placement."},
    {"copy_out", shielded<try_move<copy_out>>, METH_O, nullptr},
    {"poll_out", shielded<try_move<poll_out>>, METH_O, nullptr},
    {"finish_out", shielded<try_move<finish_out>>, METH_O, nullptr},
    {"release_next", shielded<mover_release_next>, METH_NOARGS, nullptr},
    {"copy_ahead", shielded<mover_copy_ahead>, METH_NOARGS, nullptr},
    {"settle_ahead", shielded<mover_settle_ahead>, METH_NOARGS, nullptr},
    {"resume_copies", shielded<mover_resume_copies>, METH_NOARGS, nullptr},
    {"forget_retained", shielded<mover_forget_retained>, METH_NOARGS, nullptr},
    {"sweep_captured", shielded<mover_sweep_captured>, METH_NOARGS, nullptr},
    {"end_captures", shielded<mover_end_captures>, METH_NOARGS, nullptr},
    {"drop", shielded<mover_drop>, METH_VARARGS, nullptr},
    {"release", shielded<do_move<release_group>>, METH_O, nullptr},
    {"make_reclaimable", shielded<try_move<make_reclaimable>>, METH_O, nullptr},
    {"bring_early", shielded<try_move<bring_early>>, METH_O, nullptr},
    {"bring_back", shielded<do_move<bring_back>>, METH_O, nullptr},
    {"finish_in", shielded<do_move<finish_in>>, METH_O, nullptr},
    {"release_done", shielded<mover_release_done>, METH_O, nullptr},
    {"send", shielded<do_move<send>>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef mover_members[] = {
    {"policy", T_OBJECT, offsetof(Mover, policy), READONLY, nullptr},
    {"host_is_full", T_BOOL, offsetof(Mover, host_is_full), 0, nullptr},
    {"pool_address", T_ULONGLONG, offsetof(Mover, pool), 0, nullptr},
    {"watermark_bytes", T_ULONGLONG, offsetof(Mover, watermark_bytes), 0, nullptr},
    {"most_copying", T_ULONGLONG, offsetof(Mover, most_copying), 0, nullptr},
    {"ahead_bytes", T_ULONGLONG, offsetof(Mover, ahead_bytes), 0, nullptr},
    {"holds_copies", T_BOOL, offsetof(Mover, holds_copies), 0, nullptr},
    {"makes_reclaimable", T_BOOL, offsetof(Mover, makes_reclaimable), 0, nullptr},
    {"hears_saves", T_BOOL, offsetof(Mover, hears_saves), 0, nullptr},
    {"repeated", T_ULONGLONG, offsetof(Mover, repeated), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef mover_properties[] = {
    {"resident", get_resident, nullptr, nullptr, nullptr},
    {"resident_count", get_resident_count, nullptr, nullptr, nullptr},
    {"dirty_count", get_dirty_count, nullptr, nullptr, nullptr},
    {"out", get_out, nullptr, nullptr, nullptr},
    {"stalls", get_stalls, nullptr, nullptr, nullptr},
    {"timed", get_timed, nullptr, nullptr, nullptr},
    {"indexed_count", get_indexed, nullptr, nullptr, nullptr},
    {"follower", get_follower, set_follower, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

PyTypeObject mover_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Mover",
    .tp_basicsize = sizeof(Mover),
    .tp_dealloc = mover_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Finds storage groups and moves them.",
    .tp_traverse = mover_traverse,
    .tp_clear = mover_clear,
    .tp_weaklistoffset = offsetof(Mover, weakrefs),
    .tp_methods = mover_methods,
    .tp_members = mover_members,
    .tp_getset = mover_properties,
    .tp_new = mover_make,
};

// ---- the module ---------------------------------------------------------------------------------

namespace {

// Link the shim to the core and to Python: addresses and objects by the names in links.hpp.
PyObject *link(PyObject *, PyObject *args) {
    PyObject *core, *python;
    if (PyArg_ParseTuple(args, "O!O!:link", &PyDict_Type, &core, &PyDict_Type, &python) == 0) {
        return nullptr;
    }
    Links made = {};
    PyObject *item = nullptr;
#define SWAPKIT_FILL(name)                                                                         \
    item = PyDict_GetItemString(core, #name);                                                      \
    made.name = reinterpret_cast<decltype(made.name)>(item ? PyLong_AsVoidPtr(item) : nullptr);    \
    if (made.name == nullptr) {                                                                    \
        return PyErr_Format(PyExc_KeyError, "%s", #name);                                          \
    }
    SWAPKIT_CORE(SWAPKIT_FILL)
    SWAPKIT_HOOKS(SWAPKIT_FILL)
#undef SWAPKIT_FILL
#define SWAPKIT_FILL(name)                                                                         \
    made.name = PyDict_GetItemString(python, #name);                                               \
    if (made.name == nullptr) {                                                                    \
        return PyErr_Format(PyExc_KeyError, "%s", #name);                                          \
    }
    SWAPKIT_PYTHON(SWAPKIT_FILL)
#undef SWAPKIT_FILL
    Py_INCREF(python); // never released: tensors keep pointers into the shim
    links = made;
    Py_RETURN_NONE;
}

// Read a device from its type and index; false: an exception is set.
bool read_device(PyObject *args, c10::Device *out) {
    int type, index;
    if (PyArg_ParseTuple(args, "ii", &type, &index) == 0) {
        return false;
    }
    *out = c10::Device(static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index));
    return true;
}

PyObject *device_stream(PyObject *, PyObject *args) {
    c10::Device device(c10::DeviceType::CPU);
    return read_device(args, &device)
               ? PyLong_FromVoidPtr(stream_handle(device, current_stream(device)))
               : nullptr;
}

PyObject *usage(PyObject *, PyObject *args) {
    c10::Device device(c10::DeviceType::CPU);
    if (!read_device(args, &device)) {
        return nullptr;
    }
    Usage now = device_usage(device);
    return Py_BuildValue("nn", now.in_use_bytes, now.reserved_bytes);
}

PyObject *native_rescue(PyObject *, PyObject *args) {
    int index, on;
    Py_ssize_t limit_bytes;
    if (PyArg_ParseTuple(args, "inp", &index, &limit_bytes, &on) == 0) {
        return nullptr;
    }
    rescue_register();
    rescue_limit(static_cast<std::int8_t>(index), static_cast<std::size_t>(limit_bytes));
    rescue_switch(static_cast<std::int8_t>(index), on != 0);
    Py_RETURN_NONE;
}

PyObject *native_rescues(PyObject *, PyObject *argument) {
    std::uint64_t rescues = 0, nbytes = 0;
    long index = PyLong_AsLong(argument);
    if (index == -1 && PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    rescue_counts(static_cast<std::int8_t>(index), &rescues, &nbytes);
    return Py_BuildValue("KK", rescues, nbytes);
}

// Read a GPU's index and a number of bytes; false: an exception is set.
bool read_amount(PyObject *args, std::int8_t *index, std::size_t *nbytes) {
    int number;
    Py_ssize_t amount;
    if (PyArg_ParseTuple(args, "in", &number, &amount) == 0) {
        return false;
    }
    *index = static_cast<std::int8_t>(number);
    *nbytes = static_cast<std::size_t>(amount);
    return true;
}

PyObject *native_expect(PyObject *, PyObject *args) {
    std::int8_t index;
    std::size_t nbytes;
    if (!read_amount(args, &index, &nbytes)) {
        return nullptr;
    }
    rescue_expect(index, nbytes);
    Py_RETURN_NONE;
}

PyObject *native_take(PyObject *, PyObject *args) {
    std::int8_t index;
    std::size_t nbytes, freed;
    if (!read_amount(args, &index, &nbytes)) {
        return nullptr;
    }
    {
        WithoutPython others;
        freed = reclaimable_take({c10::DeviceType::CUDA, index}, nbytes);
    }
    return PyLong_FromSize_t(freed);
}

PyObject *native_garbage(PyObject *, PyObject *) {
    return PyLong_FromSize_t(reclaimable_garbage());
}

// clock_rings(): how often alarms of planned moves have rung.
PyObject *count_rings(PyObject *, PyObject *) { return PyLong_FromUnsignedLongLong(clock_rings()); }

PyMethodDef functions[] = {
    {"set_coarse_site", shielded<set_coarse_site>, METH_O, nullptr},
    {"clock_rings", count_rings, METH_NOARGS, nullptr},
    {"native_rescue", shielded<native_rescue>, METH_VARARGS, nullptr},
    {"native_rescues", shielded<native_rescues>, METH_O, nullptr},
    {"native_expect", shielded<native_expect>, METH_VARARGS, nullptr},
    {"native_take", shielded<native_take>, METH_VARARGS, nullptr},
    {"native_garbage", shielded<native_garbage>, METH_NOARGS, nullptr},
    {"current_stream", shielded<device_stream>, METH_VARARGS, nullptr},
    {"device_usage", shielded<usage>, METH_VARARGS, nullptr},
    {"in_range", shielded<in_range>, METH_VARARGS, nullptr},
    {"link", link, METH_VARARGS, nullptr},
    {"unpack", shielded<unpack>, METH_O, "Return the saved tensor that a handle stands for."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_shim",
    .m_doc = "The hot paths of saved tensors and their storages.",
    .m_size = -1,
    .m_methods = functions,
};

// Add a list of names to the module; false: an exception is set.
template <std::size_t count>
bool add_names(PyObject *to, const char *list, const char *const (&names)[count]) {
    Ref<> made = Ref<>::steal(PyList_New(0));
    for (const char *name : names) {
        Ref<> text = Ref<>::steal(PyUnicode_FromString(name));
        if (!made || !text || PyList_Append(made.get(), text.get()) != 0) {
            return false;
        }
    }
    return PyModule_AddObjectRef(to, list, made.get()) == 0;
}

} // namespace

} // namespace swapkit

// Python looks for this name. NOLINTNEXTLINE(bugprone-reserved-identifier,readability-*)
PyMODINIT_FUNC PyInit__shim() {
    using namespace swapkit;
    Ref<> made = Ref<>::steal(PyModule_Create(&module));
    if (!made || PyModule_AddFunctions(made.get(), mark_functions) != 0 ||
        PyModule_AddFunctions(made.get(), capture_functions) != 0 ||
        PyModule_AddFunctions(made.get(), tensor_functions) != 0 ||
        PyModule_AddFunctions(made.get(), wrapper_functions) != 0 ||
        PyModule_AddFunctions(made.get(), chosen_functions) != 0 ||
        PyModule_AddFunctions(made.get(), bypass_functions) != 0 ||
        PyModule_AddFunctions(made.get(), kernel_functions) != 0 ||
        PyModule_AddFunctions(made.get(), stack_functions) != 0 ||
        PyModule_AddFunctions(made.get(), late_mode_functions) != 0) {
        return nullptr;
    }
#define SWAPKIT_NAME(name) #name,
    const char *core[] = {SWAPKIT_CORE(SWAPKIT_NAME)}, *hooks[] = {SWAPKIT_HOOKS(SWAPKIT_NAME)};
#undef SWAPKIT_NAME
    if (!add_names(made.get(), "CORE", core) || !add_names(made.get(), "HOOKS", hooks)) {
        return nullptr;
    }
    PyTypeObject *types[] = {&handle_type,   &group_type,    &mover_type,       &packer_type,
                             &follower_type, &region_type,   &lock_type,        &bypass_type,
                             &choices_type,  &choosing_type, &first_table_type, &last_table_type,
                             &hidden_type};
    for (PyTypeObject *type : types) {
        if (PyModule_AddType(made.get(), type) != 0) {
            return nullptr;
        }
    }
    if (!hide_table_checks()) {
        return nullptr;
    }
    return made.release();
}
