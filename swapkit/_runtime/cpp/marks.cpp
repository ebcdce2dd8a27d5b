// marks.cpp - marking what operators made.
#include "marks.hpp"

#include "behind.hpp"

#include <unordered_map>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

constexpr std::size_t least_sweep = 64; // marks before dead ones are looked for

struct Entry {
    c10::StorageImpl *weak; // referred to weakly: no other object gets its address
    Ref<> recipe;           // a weak reference to it
    Ref<> choice;
    Terms terms;
};

// Guarded by the interpreter, and kept for good: at the process's end there is none to let go in.
auto &entries = *new std::unordered_map<Key, Entry, KeyHash>;
std::size_t next_sweep = least_sweep;

struct Pending {
    Ref<Group> group;
    Ref<> choice;
    Terms base;
};

// What a thread that watches its operators has saved since its latest one.
thread_local int watches = 0;
thread_local std::vector<Pending> pending;

void let_go(Entry &entry) { c10::raw::weak_intrusive_ptr::decref(entry.weak); }

// For assertions: whether an entry keeps the address that it is found by.
[[maybe_unused]] bool is_sound(const Key &key, const Entry &entry) {
    return entry.weak == key.storage && static_cast<bool>(entry.choice);
}

// Forget the storages that are gone.
void sweep() {
    SWAPKIT_ASSERT(has_python());
    // What an entry holds goes last: that may run Python, which may mark.
    std::vector<Entry> dead;
    for (auto each = entries.begin(); each != entries.end();) {
        if (c10::raw::intrusive_ptr::use_count(each->first.storage) == 0) {
            dead.push_back(std::move(each->second));
            each = entries.erase(each);
        } else {
            ++each;
        }
    }
    next_sweep = std::max(least_sweep, 2 * entries.size());
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

// The same of a tensor in Python; no storage: it has no plain memory, or an exception is set.
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

// Let the scope around decide about a group after all.
bool spare(Pending &saved) {
    Group *group = saved.group.get();
    Locked lock(group->mover);
    if (!lock) {
        return false;
    }
    Py_INCREF(saved.base.choice);
    Py_DECREF(std::exchange(group->terms, saved.base).choice);
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

// Spare what this thread has just saved of a storage and not sent yet.
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

// mark(tensor, choice, recipe, changes): let a choice, or a recipe if it is not None, hold for a
// storage, once it has been changed so many times more.
PyObject *mark(PyObject *, PyObject *args) {
    PyObject *tensor, *choice, *recipe;
    unsigned int changes;
    if (PyArg_ParseTuple(args, "OOOI:mark", &tensor, &choice, &recipe, &changes) == 0) {
        return nullptr;
    }
    Entry entry = {};
    if (!terms_read(choice, &entry.terms)) {
        return nullptr;
    }
    entry.choice = Ref<>::steal(entry.terms.choice);
    if (recipe != Py_None) {
        entry.recipe = Ref<>::steal(PyWeakref_NewRef(recipe, nullptr));
        if (!entry.recipe) {
            return nullptr;
        }
    }
    Key key = key_of_object(tensor);
    if (key.storage == nullptr) {
        return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_False);
    }
    key.version += changes;
    if (entries.size() >= next_sweep) {
        sweep();
    }
    forget(key);
    entry.weak = c10::raw::intrusive_ptr::make_weak(key.storage);
    entries.emplace(key, std::move(entry));
    return Py_NewRef(Py_True);
}

// void_swaps(tensors): none of these is to be swapped because of a mark.
PyObject *void_swaps(PyObject *, PyObject *argument) {
    Ref<> tensors = Ref<>::steal(PySequence_Fast(argument, "a sequence of tensors is needed"));
    if (!tensors) {
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors.get()); i++) {
        Key key = key_of_object(PySequence_Fast_GET_ITEM(tensors.get(), i));
        if (PyErr_Occurred() != nullptr) {
            return nullptr;
        }
        auto found = entries.find(key);
        if (found != entries.end() && !found->second.recipe) {
            forget(key);
        }
        if (!spare_pending(key)) {
            return nullptr;
        }
    }
    Py_RETURN_NONE;
}

// send_pending(): send what was saved before this thread's operator, and is not void.
PyObject *send_pending(PyObject *, PyObject *) {
    std::vector<Pending> due = std::exchange(pending, {});
    for (Pending &saved : due) {
        if (!send_locked(saved.group.get())) {
            return nullptr;
        }
    }
    Py_RETURN_NONE;
}

// watch(on): this thread's operators are seen from now on, or (calls nest) not any more.
PyObject *watch(PyObject *, PyObject *argument) {
    int on = PyObject_IsTrue(argument);
    if (on < 0) {
        return nullptr;
    }
    watches += on == 1 ? 1 : -1;
    SWAPKIT_ASSERT(watches >= 0);
    return watches == 0 ? send_pending(nullptr, nullptr) : Py_NewRef(Py_None);
}

// storage_of(tensor): the address of its storage; 0: it has no plain memory.
PyObject *storage_of(PyObject *, PyObject *tensor) {
    Key key = key_of_object(tensor);
    return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromVoidPtr(key.storage);
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
    if (!entry.recipe) {
        found.terms = entry.terms;
        found.choice = Ref<>::share(entry.choice.get());
    } else if (PyObject *recipe = PyWeakref_GetObject(entry.recipe.get()); recipe != Py_None) {
        found.recipe = Ref<>::share(recipe);
    }
    return found;
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
    pending.push_back({Ref<Group>::share(group), Ref<>::share(base.choice), base});
    return true;
}

PyMethodDef mark_functions[] = {
    {"mark", shielded<mark>, METH_VARARGS, nullptr},
    {"void_swaps", shielded<void_swaps>, METH_O, nullptr},
    {"send_pending", shielded<send_pending>, METH_NOARGS, nullptr},
    {"watch", shielded<watch>, METH_O, nullptr},
    {"storage_of", shielded<storage_of>, METH_O, nullptr},
    {"has_marks", has_marks, METH_NOARGS, nullptr},
    {"marks_count", shielded<count>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
