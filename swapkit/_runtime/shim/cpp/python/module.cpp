// module.cpp - the shim as a Python module: movers, and the links to the core.
#include "held/held.hpp"
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
#include "running/hook_bypass.hpp"
#include "running/profiler_range.hpp"
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
    return static_cast<bool>(call(links.raise_interruption));
}

bool raises(sk_status status) {
    if (status == SK_OK) {
        return false;
    }
    Ref<> error = call(links.error_of, status);
    if (error) {
        PyErr_SetObject(as_object(Py_TYPE(error.get())), error.get());
    }
    return true;
}

// ---- movers -------------------------------------------------------------------------------------

namespace {

// Return an argument as a group of this mover; null: an exception is set.
Group *group_of(const Mover *mover, PyObject *argument) {
    auto *group = reinterpret_cast<Group *>(argument);
    if (Py_TYPE(argument) != &group_type || group->mover != mover) {
        PyErr_Format(PyExc_TypeError, "expected a StorageGroup of this mover, not %R", argument);
        return nullptr;
    }
    return group;
}

template <auto move> PyObject *with_group(Mover *mover, PyObject *argument) {
    Group *group = group_of(mover, argument);
    return group == nullptr ? nullptr : give(move(mover, group));
}

int drop_group(Mover *mover, PyObject *argument, PyObject *digest) {
    Group *group = group_of(mover, argument);
    return group == nullptr ? -1 : int{drop_spare(mover, group, digest)};
}

bool release_group(Mover *mover, Group *group) {
    if (group->native == nullptr) {
        PyErr_SetString(PyExc_ValueError, "cannot release a group without a copy");
        return false;
    }
    return release(mover, group);
}

Ref<> groups_of(const BySerial &groups) {
    return list_of(groups, [](const auto &each) { return for_python(each.second); });
}

Ref<> stalls_of(const Mover *mover) {
    Ref<> found = Ref<>::steal(PyDict_New());
    for (auto [site, seconds] : mover->books->stalls) {
        Ref<> key = Ref<>::steal(Py_BuildValue("(II)", site.first, site.second));
        Ref<> value = Ref<>::steal(PyFloat_FromDouble(seconds));
        if (!found || !key || !value || PyDict_SetItem(found.get(), key.get(), value.get()) != 0) {
            return {};
        }
    }
    return found;
}

template <void (*forget)(Mover *)> bool with_lock(Mover *mover) {
    Locked lock(mover);
    if (lock) {
        forget(mover);
    }
    return static_cast<bool>(lock);
}

// Read an integer attribute; false: an exception is set.
bool read_number(PyObject *object, const char *name, unsigned long long *out) {
    Ref<> value = Ref<>::steal(PyObject_GetAttrString(object, name));
    *out = value ? PyLong_AsUnsignedLongLong(value.get()) : 0;
    return PyErr_Occurred() == nullptr;
}

PyObject *mover_make(PyTypeObject *, PyObject *args, PyObject *keywords) {
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
    bool is_read =
        read_number(scheduler, "address", &sched) && read_number(scheduler, "has_disk", &has_disk);
    // Made when Python has run: nobody finds it before it is whole.
    Ref<Mover> mover = is_read ? allocate<Mover>() : Ref<Mover>();
    if (!mover) {
        return nullptr;
    }
    mover->policy = Py_NewRef(policy);
    mover->scheduler = Py_NewRef(scheduler);
    mover->lock = reinterpret_cast<Lock *>(Py_NewRef(lock));
    mover->tracker = Py_NewRef(tracker);
    mover->sched = reinterpret_cast<sk_sched *>(sched);
    mover->device_type = static_cast<c10::DeviceType>(device_type);
    mover->device_index = static_cast<c10::DeviceIndex>(device_index);
    mover->has_disk = static_cast<char>(has_disk);
    mover->watermark_bytes = mover->ahead_bytes = no_limit;
    mover->books = new Books;
    mover_join(mover.get());
    return as_object(mover.release());
}

int set_follower(PyObject *self, PyObject *value, void *) {
    bool is_none = value == nullptr || value == Py_None;
    if (!is_none && !is_of_type(value, &follower_type)) {
        return -1;
    }
    Ref<> follower = Ref<>::share(is_none ? nullptr : value);
    auto *mover = reinterpret_cast<Mover *>(self);
    auto former = Ref<Follower>::steal(
        std::exchange(mover->follower, reinterpret_cast<Follower *>(follower.release())));
    if (former) {
        follower_end(former.get());
    }
    return 0;
}

void mover_free(Mover *mover) {
    timing_end(mover);
    delete mover->books;
}

using MoverLife =
    Life<Mover, MadeByNew<mover_make>, Unlinked<mover_part>,
         Cleared<&Mover::follower, &Mover::policy, &Mover::tracker, &Mover::scheduler>,
         Freed<mover_free>, Owned<&Mover::lock>>;

} // namespace

Type mover_type(
    MoverLife(), "Mover", "Finds storage groups and moves them.",
    method<"packer", packer_new>("Return the saved-tensor hooks of a placement."),
    method<"copy_out", with_group<copy_out>>(), method<"poll_out", with_group<poll_out>>(),
    method<"finish_out", with_group<finish_out>>(), method<"release", with_group<release_group>>(),
    method<"make_reclaimable", with_group<make_reclaimable>>(),
    method<"bring_early", with_group<bring_early>>(),
    method<"bring_back", with_group<bring_back>>(), method<"finish_in", with_group<finish_in>>(),
    method<"send", with_group<send>>(), method<"release_next", agenda_release_next>(),
    method<"release_done", agenda_attend>(), method<"copy_ahead", behind_copy>(),
    method<"settle_ahead", behind_settle>(), method<"resume_copies", behind_resume>(),
    method<"forget_retained", with_lock<forget_retained>>(),
    method<"end_captures", with_lock<end_captures>>(),
    method<"sweep_captured", [](Mover *mover) { return int{mover->books->captured.sweep()}; }>(),
    method<"drop", drop_group>(), method<"watch", watch>(), method<"expose", expose>(),
    method<"file_of", held_file>(), method<"note_file", note_file>(), method<"hold", hold>(),
    method<"begin_held", held_begin>(), method<"unhold", unhold>(),
    method<"free_held", held_free>(),
    method<"exclude_held", [](Mover *, bool excluded) { return int{trap_exclude(excluded)}; }>(),
    method<"run_with", run_with>(), method<"end_held_step", held_end_step>(),
    method<"end_held", held_end>(), method<"plan_held", held_plan>(),
    method<"held_memory", held_memory>(), property<held_bytes>("held"),
    field("policy", &Mover::policy), field("repeated", &Mover::repeated),
    variable("host_is_full", &Mover::host_is_full), variable("pool_address", &Mover::pool),
    variable("watermark_bytes", &Mover::watermark_bytes),
    variable("most_copying", &Mover::most_copying), variable("ahead_bytes", &Mover::ahead_bytes),
    variable("holds_copies", &Mover::holds_copies), variable("held_tag", &Mover::held_tag),
    variable("makes_reclaimable", &Mover::makes_reclaimable),
    variable("hears_saves", &Mover::hears_saves),
    property<[](Mover *mover) { return groups_of(mover->books->resident); }>("resident"),
    property<[](Mover *mover) { return mover->books->resident.size(); }>("resident_count"),
    property<[](Mover *mover) { return mover->books->agenda.line(Line::ahead).size(); }>(
        "dirty_count"),
    property<[](Mover *mover) { return groups_of(mover->books->agenda.out); }>("out"),
    property<stalls_of>("stalls"), property<timing_counts>("timed"),
    property<[](Mover *mover) { return mover->books->index.size(); }>("indexed_count"),
    property<[](Mover *mover) {
        return Ref<>::share(mover->follower == nullptr ? Py_None : as_object(mover->follower));
    }>("follower", set_follower));

// ---- the module ---------------------------------------------------------------------------------

namespace {

// Link the shim to the core and to Python: addresses and objects by the names in links.hpp.
PyObject *link(Of<&PyDict_Type> core, Of<&PyDict_Type> python) {
    Links made = {};
    PyObject *item = nullptr;
#define SWAPKIT_FILL(name)                                                                         \
    item = PyDict_GetItemString(core.object, #name);                                               \
    made.name = reinterpret_cast<decltype(made.name)>(item ? PyLong_AsVoidPtr(item) : nullptr);    \
    if (made.name == nullptr) {                                                                    \
        return PyErr_Format(PyExc_KeyError, "%s", #name);                                          \
    }
    SWAPKIT_CORE(SWAPKIT_FILL)
    SWAPKIT_HOOKS(SWAPKIT_FILL)
#undef SWAPKIT_FILL
#define SWAPKIT_FILL(name)                                                                         \
    made.name = PyDict_GetItemString(python.object, #name);                                        \
    if (made.name == nullptr) {                                                                    \
        return PyErr_Format(PyExc_KeyError, "%s", #name);                                          \
    }
    SWAPKIT_PYTHON(SWAPKIT_FILL)
#undef SWAPKIT_FILL
    Py_INCREF(python.object); // never released: tensors keep pointers into the shim
    links = made;
    Py_RETURN_NONE;
}

c10::Device device_of(std::int8_t type, std::int8_t index) {
    return {static_cast<c10::DeviceType>(type), index};
}

PyObject *device_stream(std::int8_t type, std::int8_t index) {
    c10::Device device = device_of(type, index);
    return PyLong_FromVoidPtr(stream_handle(device, current_stream(device)));
}

PyObject *usage(std::int8_t type, std::int8_t index) {
    Usage now = device_usage(device_of(type, index));
    return Py_BuildValue("nn", now.in_use_bytes, now.reserved_bytes);
}

void native_rescue(std::int8_t index, std::size_t limit_bytes, bool is_on) {
    rescue_register();
    rescue_limit(index, limit_bytes);
    rescue_switch(index, is_on);
}

PyObject *native_rescues(std::int8_t index) {
    std::uint64_t rescues = 0, nbytes = 0;
    rescue_counts(index, &rescues, &nbytes);
    return Py_BuildValue("KK", rescues, nbytes);
}

std::size_t native_take(std::int8_t index, std::size_t nbytes) {
    WithoutPython others;
    return reclaimable_take({c10::DeviceType::CUDA, index}, nbytes);
}

// clock_rings(): how often alarms of planned moves have rung.
const Functions module_functions{
    module_function<"set_coarse_site", set_coarse_site>(),
    module_function<"clock_rings", clock_rings>(),
    module_function<"native_rescue", native_rescue>(),
    module_function<"native_rescues", native_rescues>(),
    module_function<"native_expect", rescue_expect>(),
    module_function<"native_take", native_take>(),
    module_function<"native_garbage", reclaimable_garbage>(),
    module_function<"current_stream", device_stream>(),
    module_function<"device_usage", usage>(),
    module_function<"in_range", in_range>(),
    module_function<"is_sealed", is_sealed>(),
    module_function<"link", link>(),
    module_function<"unpack", unpack>("Return the saved tensor that a handle stands for."),
};

PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_shim",
    .m_doc = "The hot paths of saved tensors and their storages.",
    .m_size = -1,
};

// Add a list of names to the module; false: an exception is set.
template <std::size_t count>
bool add_names(PyObject *to, const char *list, const char *const (&names)[count]) {
    Ref<> made =
        list_of(names, [](const char *name) { return Ref<>::steal(PyUnicode_FromString(name)); });
    return made && PyModule_AddObjectRef(to, list, made.get()) == 0;
}

} // namespace

} // namespace swapkit

// Python looks for this name. NOLINTNEXTLINE(bugprone-reserved-identifier,readability-*)
PyMODINIT_FUNC PyInit__shim() {
    using namespace swapkit;
    Ref<> made = Ref<>::steal(PyModule_Create(&module));
    auto &functions = module_parts<PyMethodDef>();
    if (functions.back().ml_name != nullptr) { // Python may load the module again
        functions.push_back({});
    }
    if (!made || PyModule_AddFunctions(made.get(), functions.data()) != 0) {
        return nullptr;
    }
#define SWAPKIT_NAME(name) #name,
    const char *core[] = {SWAPKIT_CORE(SWAPKIT_NAME)}, *hooks[] = {SWAPKIT_HOOKS(SWAPKIT_NAME)};
#undef SWAPKIT_NAME
    if (!add_names(made.get(), "CORE", core) || !add_names(made.get(), "HOOKS", hooks)) {
        return nullptr;
    }
    for (PyTypeObject *type : module_parts<PyTypeObject *>()) {
        if (PyModule_AddType(made.get(), type) != 0) {
            return nullptr;
        }
    }
    if (!hide_table_checks()) {
        return nullptr;
    }
    return made.release();
}
