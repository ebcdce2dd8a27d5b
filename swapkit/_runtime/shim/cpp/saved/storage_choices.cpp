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
int mark(PyObject *tensor, PyObject *placement, std::uint32_t changes) {
    Terms terms = {};
    if (!terms_read(placement, &terms)) {
        return -1;
    }
    auto owned = Ref<>::steal(terms.placement);
    Key key = key_of_object(tensor);
    if (key.storage == nullptr) {
        return PyErr_Occurred() != nullptr ? -1 : 0;
    }
    key.version += changes;
    add_mark(key, terms);
    return 1;
}

// void_swaps(tensors): let no mark swap any of these tensors.
bool void_swaps(const Items &tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](PyObject *tensor) {
        Key key = key_of_object(tensor);
        return PyErr_Occurred() == nullptr && void_swap(key);
    });
}

const Functions mark_functions{module_function<"mark", mark>(),
                               module_function<"void_swaps", void_swaps>(),
                               module_function<"has_marks", [] { return int{!entries.empty()}; }>(),
                               module_function<"marks_count", [] {
                                   sweep();
                                   return entries.size();
                               }>()};

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

} // namespace swapkit
