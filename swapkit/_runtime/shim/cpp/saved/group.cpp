// group.cpp - handles and groups: references to storages, and rebuilding tensors bit for bit.
#include "held/held.hpp"
#include "memory/copy_owners.hpp"
#include "memory/reclaimable.hpp"
#include "moves/mover.hpp"
#include "moves/prefetch.hpp"
#include "recompute/recomputed.hpp"
#include "saved/weights.hpp"

#include <algorithm>
#include <atomic>

namespace swapkit {

namespace {

// If the saved views cover at least this share of their storage, all of it moves.
constexpr double coverage = 0.5;

// The states of a group without a native group.
constexpr sk_group_state resident = SK_GROUP_RESIDENT, computed_again = SK_GROUP_OUT;

std::atomic<std::size_t> group_count{0};

std::uint32_t version_of(c10::TensorImpl *impl) {
    return impl->is_inference() ? 0 : impl->version_counter().current_version();
}

// For assertions: whether a group's list of handles is consistent.
[[maybe_unused]] bool handles_are_sound(const Group *group) {
    std::size_t count = 0;
    const Handle *previous = nullptr;
    for (const Handle *handle = group->handles; handle != nullptr; handle = handle->next) {
        if (handle->group != group || handle->previous != previous) {
            return false;
        }
        previous = handle;
        count++;
    }
    return count == group->nhandles;
}

void handle_join(Handle *handle, Group *group) {
    SWAPKIT_ASSERT(has_python() && handle->group == nullptr);
    Py_INCREF(group);
    handle->group = group;
    handle->shift = static_cast<std::int64_t>(group->shift_bytes / handle->alias->itemsize());
    handle->next = group->handles;
    if (handle->next != nullptr) {
        handle->next->previous = handle;
    }
    group->handles = handle;
    group->nhandles++;
    SWAPKIT_ASSERT(handles_are_sound(group));
}

void handle_part(Handle *handle) {
    Group *group = handle->group;
    SWAPKIT_ASSERT(has_python() && group->nhandles > 0);
    (handle->previous == nullptr ? group->handles : handle->previous->next) = handle->next;
    if (handle->next != nullptr) {
        handle->next->previous = handle->previous;
    }
    group->nhandles--;
    SWAPKIT_ASSERT(handles_are_sound(group));
}

// Drop the storage; the alias still tracks the version.
void handle_strip(Handle *handle) {
    if (!handle->is_stripped) {
        handle_leave_held(handle);
        exchange_storage(handle->alias, nullptr, 0);
        handle->is_stripped = true;
    }
}

} // namespace

void handle_leave_held(Handle *handle) {
    if (std::exchange(handle->is_of_held, false)) {
        held_unaliased(handle->alias);
    }
}

// ---- handles ------------------------------------------------------------------------------------

// Return a new handle that takes over the caller's alias. Null: an exception is set.
static Handle *handle_of(c10::TensorImpl *alias) {
    Handle *handle = allocate<Handle>().release();
    if (handle == nullptr) {
        c10::raw::intrusive_ptr::decref(alias);
        return nullptr;
    }
    handle->alias = alias;
    handle->version = version_of(alias);
    handle->is_of_held = held_aliased(alias);
    return handle;
}

Handle *handle_keep(PyObject *tensor, bool itself) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return nullptr;
    }
    itself = itself || gathers_gradients(impl);
    if (!itself && as_object(Py_TYPE(tensor)) == links.tensor &&
        plain_storage(*impl, 0) != nullptr) {
        return handle_of(detached(impl));
    }
    // Other kinds of tensors have their own `detach`.
    Ref<> alias = itself ? Ref<>::share(tensor) : call_method<"detach">(tensor);
    if (!alias || !impl_of(alias.get(), &impl)) {
        return nullptr;
    }
    c10::raw::intrusive_ptr::incref(impl);
    return handle_of(impl);
}

Handle *handle_saved(PyObject *tensor) {
    c10::TensorImpl *impl = nullptr;
    return impl_of(tensor, &impl) ? handle_keep(tensor, is_leaf(impl)) : nullptr;
}

Handle *handle_new(c10::TensorImpl *tensor, Group *group) {
    Handle *handle = handle_of(detached(tensor));
    if (handle != nullptr && group != nullptr) {
        handle_join(handle, group);
        if (group->storage == nullptr) {
            handle_strip(handle);
        }
    }
    return handle;
}

void handle_follow(Handle *handle, c10::TensorImpl *tensor) {
    SWAPKIT_ASSERT(has_python());
    if (handle->leaf == nullptr && is_leaf(tensor)) {
        handle->leaf = c10::raw::intrusive_ptr::make_weak(tensor);
    }
}

c10::TensorImpl *handle_leaf(const Handle *handle) {
    c10::TensorImpl *leaf =
        handle->leaf == nullptr ? nullptr : c10::raw::weak_intrusive_ptr::lock(handle->leaf);
    if (leaf != nullptr && version_of(leaf) != handle->version) { // of a region, which has ended
        c10::raw::intrusive_ptr::decref(std::exchange(leaf, nullptr));
    }
    return leaf;
}

Handle *handle_inside(c10::TensorImpl *tensor, c10::TensorImpl *wrapper) {
    Watch watch{.counter = wrapper->version_counter(), .version = version_of(wrapper)};
    // Under the tensor's own counter, its group also serves plain tensors that share its memory.
    // But that counter has missed the changes of a wrapper that was changed.
    Handle *handle =
        handle_of(watch.version == 0 ? detached(tensor) : detached(tensor, watch.counter));
    if (handle != nullptr) {
        handle->watch = new Watch(std::move(watch));
    }
    return handle;
}

void handle_watch(Handle *handle, const Watch &watch) {
    delete std::exchange(handle->watch, new Watch(watch));
    if (handle->group != nullptr) {
        handle->group->is_watched = 1;
    }
}

bool handle_is_intact(const Handle *handle) {
    return handle->watch == nullptr ? version_of(handle->alias) == handle->version
                                    : handle->watch->is_intact();
}

bool handle_has_changed_inside(const Handle *handle) {
    return handle->watch != nullptr && version_of(handle->alias) != handle->version;
}

bool handle_check(Handle *handle) {
    return handle_is_intact(handle) || call(links.refuse_modified, handle);
}

bool handle_refuse_moved(Handle *handle) {
    return handle->group == nullptr || handle->group->is_moved == 0 ||
           call(links.refuse_modified, handle);
}

void handle_fill(Handle *handle) {
    Group *group = handle->group;
    if (!handle->is_stripped || group == nullptr || group->storage == nullptr) {
        return;
    }
    auto shift = static_cast<std::int64_t>(group->shift_bytes / handle->alias->itemsize());
    exchange_storage(handle->alias, group->storage, shift - handle->shift);
    handle->shift = shift;
    handle->is_stripped = false;
}

// ---- groups -------------------------------------------------------------------------------------

bool is_any_group() { return group_count.load(std::memory_order_relaxed) != 0; }

Group *group_new(Mover *mover, const Terms &terms, Key key) {
    auto *group = reinterpret_cast<Group *>(group_type.tp_alloc(&group_type, 0));
    if (group == nullptr) {
        return nullptr;
    }
    group_count++;
    Py_INCREF(mover);
    group->mover = mover;
    Py_INCREF(terms.placement);
    group->terms = terms;
    swapkit_storage_hold(key.storage);
    group->storage = key.storage;
    group->key = key;
    group->nbytes = key.storage->nbytes();
    group->cover = {.begin_bytes = group->nbytes, .end_bytes = 0};
    group->state_at = &resident;
    return group;
}

Group *group_new_recomputed(Mover *mover, const Terms &terms, Key key) {
    Group *group = group_new(mover, terms, key);
    if (group != nullptr) {
        group->cover = {.begin_bytes = 0, .end_bytes = group->nbytes};
        // The caller that runs the operator holds the storage.
        group->weak = c10::raw::intrusive_ptr::make_weak(group->storage);
        group_strip(group);
    }
    return group;
}

void group_part(Group *group, std::size_t nbytes) {
    c10::raw::weak_intrusive_ptr::decref(std::exchange(group->weak, nullptr));
    group->nbytes = nbytes;
    group->cover = {.begin_bytes = 0, .end_bytes = nbytes};
}

sk_group_state group_state(const Group *group) { return *group->state_at; }

bool group_is_partial(const Group *group) {
    double covered =
        static_cast<double>(group->cover.end_bytes) - static_cast<double>(group->cover.begin_bytes);
    return covered < static_cast<double>(group->nbytes) * coverage &&
           (group->storage == nullptr || has_plain_format(group->storage));
}

bool group_has_storage(const Group *group) {
    // Code that manages storages itself (FSDP) resizes them without autograd's knowledge.
    return group->storage != nullptr &&
           group->storage->nbytes() + group->shift_bytes >= group->cover.end_bytes;
}

bool group_is_exclusive(const Group *group) {
    if (!group_has_storage(group)) {
        return false;
    }
    std::size_t holders = count_holders(group->storage);
    if (holders > 1 + group->nhandles) {
        return false; // whichever handles have it; a weight may have thousands of handles
    }
    std::size_t ours = 1;
    for (Handle *handle = group->handles; handle != nullptr; handle = handle->next) {
        ours += handle->is_stripped ? 0 : 1;
    }
    return holders == ours;
}

thread_local const Watch *watch_around = nullptr;

namespace {

// Like the end of `group_can_take`, where wrappers have the storage inside: a wrapper and what is
// inside it have version counters of their own, and a change may show in either.
bool wrapped_can_take(const Group *group, const c10::TensorImpl *tensor) {
    bool shares = false;
    for (const Handle *handle = group->handles; handle != nullptr; handle = handle->next) {
        if (!handle_is_intact(handle) || handle_has_changed_inside(handle)) {
            return false;
        }
        shares = shares || shares_versions(handle->alias, tensor) ||
                 (handle->watch != nullptr && watch_around != nullptr &&
                  is_same_counter(handle->watch->counter, watch_around->counter));
    }
    return shares;
}

} // namespace

bool group_can_take(const Group *group, const c10::TensorImpl *tensor, Span span) {
    if (group->native == nullptr) {
        return true;
    }
    // Offsets in the first storage, of which the copy has [part, part + nbytes).
    bool has_bytes = group->part_bytes <= span.begin_bytes + group->shift_bytes &&
                     span.end_bytes + group->shift_bytes <= group->part_bytes + group->nbytes;
    if (has_bytes && (group->is_watched != 0 || watch_around != nullptr)) {
        return wrapped_can_take(group, tensor);
    }
    const Handle *handle = has_bytes ? group->handles : nullptr;
    while (handle != nullptr && !shares_versions(handle->alias, tensor)) {
        handle = handle->next; // under another counter, an equal version may hide later changes
    }
    return handle != nullptr;
}

void group_cover(Group *group, Span span) {
    group->cover.begin_bytes =
        std::min(group->cover.begin_bytes, span.begin_bytes + group->shift_bytes);
    group->cover.end_bytes = std::max(group->cover.end_bytes, span.end_bytes + group->shift_bytes);
}

void group_measure(Group *group) {
    if (group->is_moved == 0) {
        group->part_bytes = 0;
        group->nbytes = group->storage->nbytes();
    }
}

void group_forget_copy(Group *group) {
    SWAPKIT_ASSERT(group->storage != nullptr && group->native != nullptr);
    links.sk_group_destroy(std::exchange(group->native, nullptr));
    group->state_at = &resident;
    group_measure(group);
}

void group_drop_copy(Group *group) {
    SWAPKIT_ASSERT(group->recipe != nullptr && group->native != nullptr && group->part_bytes == 0);
    if (std::exchange(group->is_reclaimable, 0) != 0) {
        reclaimable_forget(group->key.storage);
    }
    links.sk_group_destroy(std::exchange(group->native, nullptr));
    group->state_at = group->storage != nullptr ? &resident : &computed_again;
}

void group_arrive(Group *group) {
    if (group->is_held == 0 || group->weak == nullptr) {
        return;
    }
    c10::StorageImpl *fresh = std::exchange(group->storage, nullptr);
    c10::StorageImpl *own = c10::raw::weak_intrusive_ptr::lock(group->weak);
    if (own == nullptr) { // the program has dropped it meanwhile
        group->storage = fresh;
        return;
    }
    storage_seal(own, false);
    own->set_data_ptr_noswap(reclaimable_empty(fresh));
    swapkit_storage_drop(fresh);
    c10::raw::weak_intrusive_ptr::decref(std::exchange(group->weak, nullptr));
    group->storage = own;
    group->copied_from = memory_of(own);
}

void group_strip(Group *group) {
    if (group->storage == nullptr) {
        return;
    }
    if (group->is_held != 0) {
        c10::StorageImpl *storage = std::exchange(group->storage, nullptr);
        group->weak = c10::raw::intrusive_ptr::make_weak(storage);
        c10::DataPtr memory = storage->set_data_ptr(c10::DataPtr(nullptr, storage->device()));
        storage_seal(storage, true);
        swapkit_storage_drop(storage);
        return;
    }
    SWAPKIT_ASSERT(has_python());
    if (group->native == nullptr) { // its recipe recomputes the bytes
        group->state_at = &computed_again;
    }
    if (group->weak == nullptr && (group->is_reclaimable != 0 || !group_is_exclusive(group))) {
        group->weak = c10::raw::intrusive_ptr::make_weak(group->storage);
    }
    for (Handle *handle = group->handles; handle != nullptr; handle = handle->next) {
        handle_strip(handle);
    }
    swapkit_storage_drop(std::exchange(group->storage, nullptr));
}

bool group_revive(Group *group) {
    if (group->storage == nullptr && group->weak != nullptr) {
        group->storage = c10::raw::weak_intrusive_ptr::lock(group->weak);
        if (group->storage != nullptr && group->native == nullptr) {
            group->state_at = &resident;
        } else if (group->storage != nullptr && std::exchange(group->is_reclaimable, 0) != 0) {
            reclaimable_forget(group->storage);
        } else if (group->storage != nullptr && links.sk_group_unevict(group->native) != SK_OK) {
            swapkit_storage_drop(std::exchange(group->storage, nullptr));
        }
    }
    return group->storage != nullptr;
}

void group_restore(Group *group, c10::StorageImpl *storage) {
    SWAPKIT_ASSERT(has_python() && group->storage == nullptr);
    group->storage = storage;
    group->copied_from = memory_of(storage);
    group->is_moved = 1;
    if (group->native == nullptr) {
        group->state_at = &resident;
    }
    group->shift_bytes = group->part_bytes;
    if (group->is_held == 0 && group->weak != nullptr) {
        c10::raw::weak_intrusive_ptr::decref(std::exchange(group->weak, nullptr));
    }
}

// ---- Python's types -----------------------------------------------------------------------------

namespace {

PyObject *handle_make(PyTypeObject *, PyObject *args, PyObject *keywords) {
    static const char *names[] = {"tensor", "itself", nullptr};
    PyObject *tensor = nullptr;
    int itself = 0;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "O|$p:SavedTensor", const_cast<char **>(names),
                                    &tensor, &itself) == 0) {
        return nullptr;
    }
    return as_object(handle_keep(tensor, itself != 0));
}

// Weakref callbacks may look at every list: the object leaves them first.

void handle_unlink(Handle *handle) {
    if (handle->group != nullptr) {
        handle_part(handle);
        handle->group->mover->books->captured.sweep();
        if (handle->group->nhandles == 0) {
            sweep_retained(handle->group->mover);
        }
    }
}

void handle_free(Handle *handle) {
    handle_leave_held(handle);
    if (handle->alias != nullptr) {
        c10::raw::intrusive_ptr::decref(handle->alias);
    }
    if (handle->leaf != nullptr) {
        c10::raw::weak_intrusive_ptr::decref(handle->leaf);
    }
    weight_free(handle->weight);
    delete handle->watch;
}

void group_unlink(Group *group) {
    SWAPKIT_ASSERT(has_python() && group->handles == nullptr && group->nhandles == 0);
    group_count--;
    mover_forget(group->mover, group);
    timing_forget(group);
    recipe_leave(group);
}

void group_free(Group *group) {
    if (group->is_reclaimable != 0) {
        reclaimable_forget(group->key.storage); // the weak reference still reserves its address
    }
    if (group->native != nullptr) {
        links.sk_group_destroy(group->native);
    }
    if (group->weak != nullptr) {
        c10::raw::weak_intrusive_ptr::decref(group->weak);
    }
    if (group->storage != nullptr) {
        swapkit_storage_drop(group->storage);
    }
    description_free(group->description);
    Py_XDECREF(group->digest);
    Py_DECREF(group->terms.placement);
}

// Return the leaf that the handle stands for, as long as other code holds it; None: there is none.
PyObject *get_leaf(const Handle *handle) {
    c10::TensorImpl *leaf = handle_leaf(handle);
    if (leaf == nullptr) {
        Py_RETURN_NONE;
    }
    return wrap_owned(leaf);
}

int set_leaf(PyObject *self, PyObject *tensor, void *) {
    c10::TensorImpl *impl = nullptr;
    if (tensor == nullptr || !impl_of(tensor, &impl)) {
        return -1;
    }
    handle_follow(reinterpret_cast<Handle *>(self), impl);
    return 0;
}

// Return the version of the wrapper around a saved tensor, now and at the save; None: there is
// none.
PyObject *get_watched(const Handle *handle) {
    const Watch *watch = handle->watch;
    if (watch == nullptr) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("II", static_cast<unsigned>(watch->counter.current_version()),
                         static_cast<unsigned>(watch->version));
}

Ref<> get_handles(const Group *group) {
    Ref<> list = Ref<>::steal(PyList_New(0));
    for (Handle *handle = group->handles; list && handle != nullptr; handle = handle->next) {
        if (PyList_Append(list.get(), as_object(handle)) != 0) {
            return {};
        }
    }
    return list;
}

PyObject *get_storage(const Group *group) {
    c10::StorageImpl *storage = group->storage;
    if (storage == nullptr) {
        Py_RETURN_NONE;
    }
    swapkit_storage_hold(storage); // the wrapper takes its own reference, from a weak one
    Ref<> wrapper = call(links.wrap_storage, reinterpret_cast<std::uintptr_t>(storage));
    swapkit_storage_drop(storage);
    return wrapper.release();
}

// Return whether a rescue may drop the storage.
bool is_spare(const Group *group) {
    return group->standby == Standby::spare ||
           (group->standby == Standby::held && group->native == nullptr);
}

using HandleLife = Life<Handle, MadeByNew<handle_make>, Unlinked<handle_unlink>, Freed<handle_free>,
                        Owned<&Handle::group, &Handle::teller>>;
using GroupLife = Life<Group, Unlinked<group_unlink>, Freed<group_free>, Owned<&Group::mover>>;

} // namespace

Type handle_type(HandleLife(), "SavedTensor",
                 "The handle that autograd keeps in place of a saved tensor.",
                 field("group", &Handle::group), field("version", &Handle::version),
                 field("is_stripped", &Handle::is_stripped),
                 property<[](Handle *handle) { return wrap(handle->alias); }>("alias"),
                 property<get_leaf>("leaf", set_leaf), property<get_watched>("watched"));

Type group_type(GroupLife(), "StorageGroup",
                "One storage at one version, with all saved tensors that view it.",
                field("mover", &Group::mover),
                field("placement", &Terms::placement, offset_of(&Group::terms)),
                field("nbytes", &Group::nbytes), field("part_bytes", &Group::part_bytes),
                field("serial", &Group::serial), variable("operator", &Group::operation),
                field("tag", &Group::tag), field("index", &Group::index),
                property<group_state>("state"), property<get_handles>("handles"),
                property<get_storage>("storage"), property<made_bytes>("made_bytes"),
                property<group_is_partial>("is_partial"),
                property<group_is_exclusive>("is_exclusive"), property<is_spare>("is_spare"),
                property<[](Group *group) { return group->storage != nullptr; }>("is_on_device"),
                property<[](Group *group) { return group->weak != nullptr; }>("is_kept_by_others"));

} // namespace swapkit
