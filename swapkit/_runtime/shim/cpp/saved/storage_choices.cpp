// storage_choices.cpp - marking the results of operators.
#include "saved/storage_choices.hpp"

#include "moves/write_behind.hpp"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

constexpr std::size_t least_marks = 64; // marks before the first sweep

struct Entry {
    c10::StorageImpl *weak; // a weak reference: no other object gets its address
    Ref<> placement;
    Terms terms;
    Ref<> owner; // of `is_void`
    bool *is_void;
};

// Guarded by the GIL. Never destroyed: at exit no interpreter is left to release the choices.
auto &entries = *new std::unordered_map<Key, Entry, KeyHash>;
std::size_t next_sweep = least_marks;

struct Pending {
    Ref<Group> group;
    Ref<> placement;
    Terms base;
    std::uint64_t nodes; // that autograd had made on this thread
};

constexpr std::uint64_t nodes_ahead = 2; // after so many more nodes a swap cannot become void

// The groups that a thread that watches its operators has saved since the latest one.
thread_local int watches = 0;
thread_local std::vector<Pending> pending;

void let_go(Entry &entry) { c10::raw::weak_intrusive_ptr::decref(entry.weak); }

// For assertions: whether an entry keeps the address of its key.
[[maybe_unused]] bool is_sound(const Key &key, const Entry &entry) {
    return entry.weak == key.storage && static_cast<bool>(entry.placement);
}

// Remove the entries of storages that are gone.
void sweep() {
    SWAPKIT_ASSERT(has_python());
    // Destroy the entries last: that may run Python, which may add marks.
    std::vector<Entry> dead;
    for (auto each = entries.begin(); each != entries.end();) {
        if (c10::raw::intrusive_ptr::use_count(each->first.storage) == 0) {
            dead.push_back(std::move(each->second));
            each = entries.erase(each);
        } else {
            ++each;
        }
    }
    next_sweep = std::max(least_marks, 2 * entries.size());
    for (Entry &entry : dead) {
        let_go(entry);
    }
}

void forget(Key key) {
    auto found = entries.find(key);
    if (found != entries.end()) {
        Entry entry = std::move(found->second);
        entries.erase(found);
        let_go(entry);
    }
}

// Like `key_of`, for a Python tensor; no storage: it has no plain memory, or an exception is set.
Key key_of_object(PyObject *tensor) {
    c10::TensorImpl *impl = nullptr;
    if (as_object(Py_TYPE(tensor)) != links.tensor || !impl_of(tensor, &impl)) {
        return {.storage = nullptr, .version = 0};
    }
    return key_of(*impl);
}

bool send_locked(Group *group) {
    Locked lock(group->mover);
    return lock && send(group->mover, group);
}

// Let the surrounding scope decide about a group whose swap is void.
bool spare(Pending &saved) {
    Group *group = saved.group.get();
    Locked lock(group->mover);
    if (!lock) {
        return false;
    }
    Py_INCREF(saved.base.placement);
    Py_DECREF(std::exchange(group->terms, saved.base).placement);
    switch (saved.base.action) {
    case Action::swap:
        if (!saved.base.spares) {
            return send(group->mover, group);
        }
        break;
    case Action::automatic:
        return behind_saved(group->mover, group, true);
    default:
        break;
    }
    group->terms.action = Action::keep;
    return true;
}

// Spare the group of a storage that this thread has saved and not sent yet.
bool spare_pending(Key key) {
    auto is_of = [key](const Pending &saved) { return saved.group->key == key; };
    auto found = std::find_if(pending.begin(), pending.end(), is_of);
    if (found == pending.end()) {
        return true;
    }
    Pending saved = std::move(*found);
    pending.erase(found);
    return spare(saved);
}

// ---- for Python ---------------------------------------------------------------------------------

// mark(tensor, choice, changes): apply a choice to a storage after `changes` more in-place changes.
PyObject *mark(PyObject *, PyObject *args) {
    PyObject *tensor, *placement;
    unsigned int changes;
    Terms terms = {};
    if (PyArg_ParseTuple(args, "OOI:mark", &tensor, &placement, &changes) == 0 ||
        !terms_read(placement, &terms)) {
        return nullptr;
    }
    auto owned = Ref<>::steal(terms.placement);
    Key key = key_of_object(tensor);
    if (key.storage == nullptr) {
        return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_False);
    }
    key.version += changes;
    add_mark(key, terms);
    return Py_NewRef(Py_True);
}

// void_swaps(tensors): let no mark swap any of these tensors.
PyObject *void_swaps(PyObject *, PyObject *argument) {
    Ref<> tensors = Ref<>::steal(PySequence_Fast(argument, "expected a sequence of tensors"));
    if (!tensors) {
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors.get()); i++) {
        Key key = key_of_object(PySequence_Fast_GET_ITEM(tensors.get(), i));
        if (PyErr_Occurred() != nullptr) {
            return nullptr;
        }
        if (!void_swap(key)) {
            return nullptr;
        }
    }
    Py_RETURN_NONE;
}

PyObject *has_marks(PyObject *, PyObject *) { return PyBool_FromLong(!entries.empty()); }

PyObject *count(PyObject *, PyObject *) {
    sweep();
    return PyLong_FromSize_t(entries.size());
}

} // namespace

Key key_of(c10::TensorImpl &tensor) {
    c10::StorageImpl *storage = plain_storage(tensor, 1);
    if (storage == nullptr) {
        return {.storage = nullptr, .version = 0};
    }
    return {.storage = storage, .version = tensor.version_counter().current_version()};
}

bool marks_are_empty() { return entries.empty(); }

Mark find_mark(Key key) {
    Mark found = {};
    SWAPKIT_ASSERT(has_python());
    auto at = entries.find(key);
    if (at == entries.end()) {
        return found;
    }
    const Entry &entry = at->second;
    SWAPKIT_ASSERT(is_sound(at->first, entry));
    found.terms = entry.terms;
    found.placement = Ref<>::share(entry.placement.get());
    return found;
}

// NOLINTNEXTLINE(readability-non-const-parameter): `void_swap` writes to it
void add_mark(Key key, const Terms &terms, PyObject *owner, bool *is_void) {
    if (entries.size() >= next_sweep) {
        sweep();
    }
    forget(key);
    entries.emplace(key, Entry{.weak = c10::raw::intrusive_ptr::make_weak(key.storage),
                               .placement = Ref<>::share(terms.placement),
                               .terms = terms,
                               .owner = owner == nullptr ? Ref<>{} : Ref<>::share(owner),
                               .is_void = is_void});
}

bool void_swap(Key key) {
    auto found = entries.find(key);
    if (found != entries.end() && found->second.is_void != nullptr) {
        *found->second.is_void = true;
    }
    forget(key);
    return spare_pending(key);
}

void watch_begin() { watches++; }

bool watch_end() {
    watches--;
    SWAPKIT_ASSERT(watches >= 0);
    return watches > 0 || send_pending();
}

bool send_pending() {
    std::vector<Pending> due = std::exchange(pending, {});
    return std::all_of(due.begin(), due.end(),
                       [](const Pending &saved) { return send_locked(saved.group.get()); });
}

bool send_passed() {
    // In the order of the saves.
    while (!pending.empty() && pending.front().nodes + nodes_ahead <= at::sequence_number::peek()) {
        Pending due = std::move(pending.front());
        pending.erase(pending.begin());
        if (!send_locked(due.group.get())) {
            return false;
        }
    }
    return true;
}

bool send_marked(Mover *mover, Group *group, const Terms &base, bool is_new) {
    bool is_pending = std::any_of(pending.begin(), pending.end(), [group](const Pending &saved) {
        return saved.group.get() == group;
    });
    if (is_pending) {
        return true;
    }
    if (watches == 0 || !is_new) {
        return send(mover, group);
    }
    pending.push_back({.group = Ref<Group>::share(group),
                       .placement = Ref<>::share(base.placement),
                       .base = base,
                       .nodes = at::sequence_number::peek()});
    return true;
}

PyMethodDef mark_functions[] = {
    {"mark", shielded<mark>, METH_VARARGS, nullptr},
    {"void_swaps", shielded<void_swaps>, METH_O, nullptr},
    {"has_marks", has_marks, METH_NOARGS, nullptr},
    {"marks_count", shielded<count>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
