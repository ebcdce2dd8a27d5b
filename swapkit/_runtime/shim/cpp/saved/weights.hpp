// weights.hpp - weights that a region reads anew in backward.
//
// A region keeps a *weight* (a leaf that accumulates gradients, or a parameter) that an operator
// reads or autograd saves a view of, but not the weight's memory: programs that stream weights
// assign another `.data` between forward and backward. What is read is the memory of forward if
// that is still there and the program has not written to it; else the memory that the weight has
// now, as in a second run of the region's function.
//
// Everything here needs the GIL, unless noted.
#ifndef SWAPKIT_WEIGHTS_HPP
#define SWAPKIT_WEIGHTS_HPP

#include "saved/saved_tensors.hpp"

#include <vector>

namespace swapkit {

struct Weight {
    c10::TensorImpl *leaf;                    // owned
    c10::StorageImpl *first;                  // weak: its storage in forward,
    std::vector<std::int64_t> sizes, strides; // and its layout there
    std::int64_t offset;
    caffe2::TypeMeta dtype;
    bool is_written; // the program has written to that storage

    // Whether the weight has other memory now.
    bool has_left() const {
        return !leaf->has_storage() || leaf->unsafe_storage().unsafeGetStorageImpl() != first;
    }
};

// Return a handle without memory of a weight, or of a view of one. Null without an exception: the
// tensor is neither, or has other memory than the weight.
Handle *handle_reading(c10::TensorImpl *tensor);
// Return the tensor of such a handle for an operator, or None for autograd; the caller owns it.
// Null: the weight has another layout now, or no memory, and an exception is set.
c10::TensorImpl *handle_read(Handle *handle, PyObject *reader);
void weight_free(Weight *weight);

// Return whether any weight has this storage in forward. On any thread, without the GIL.
bool is_of_weight(const c10::StorageImpl *storage);
bool is_any_weight();
// Note that the program writes to these storages.
void weights_written(const std::vector<c10::StorageImpl *> &changed);

} // namespace swapkit

#endif
