// unpacked.cpp - the handle of a saved tensor in a group, and the tensor that autograd gets back.
#include "saved/pack_hooks.hpp"
#include "saved/weights.hpp"

#include <utility>

namespace swapkit {

Ref<> new_handle(c10::TensorImpl *tensor, Group *group) {
    Handle *handle = handle_new(tensor, group);
    if (handle != nullptr) {
        handle_follow(handle, tensor);
    }
    return Ref<>::steal(as_object(handle));
}

// Return whether a leaf does not need its group's bytes: the program has assigned its `.data`, or
// has kept its memory, which the group has released.
static bool is_apart(const c10::TensorImpl *leaf, const Group *group) {
    return !leaf->has_storage() || leaf->unsafe_storage().unsafeGetStorageImpl() != group->storage;
}

PyObject *tensor_of(Handle *handle) {
    if (handle->weight != nullptr) {
        return wrap_owned(handle_read(handle, Py_None));
    }
    c10::TensorImpl *leaf = handle_leaf(handle);
    if (handle->group == nullptr && leaf == nullptr) {
        return wrap(handle->alias);
    }
    bool is_given = handle->group == nullptr || (leaf != nullptr && is_apart(leaf, handle->group));
    bool is_there = is_given || (handle_bytes(handle) && (!handle_has_changed_inside(handle) ||
                                                          handle_refuse_moved(handle)));
    PyObject *tensor = nullptr;
    if (is_there) {
        // Do not return the alias: another thread may strip it before autograd has read it.
        tensor = wrap_owned(leaf != nullptr ? std::exchange(leaf, nullptr) //
                                            : detached(handle->alias));
    }
    if (leaf != nullptr) {
        c10::raw::intrusive_ptr::decref(leaf);
    }
    return tensor;
}

} // namespace swapkit
