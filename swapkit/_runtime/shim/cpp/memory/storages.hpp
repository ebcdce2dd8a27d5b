// storages.hpp - access to tensors and storages below Python, for saved tensors.
#ifndef SWAPKIT_STORAGES_HPP
#define SWAPKIT_STORAGES_HPP

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>

namespace swapkit {

// The part of a storage that a tensor views.
struct Span {
    std::size_t begin_bytes, end_bytes;
};

// Return the storage of a tensor, borrowed. Null: the tensor is not plain strided memory of at
// least `least_bytes`.
c10::StorageImpl *plain_storage(c10::TensorImpl &tensor, std::size_t least_bytes);
// Like `plain_storage`; also return the part of the storage that the tensor views.
c10::StorageImpl *look(c10::TensorImpl &tensor, std::size_t least_bytes, Span *out);

// Return whether a tensor's memory is there. Code that manages storages itself (FSDP) frees memory
// without notice.
inline bool has_memory(c10::TensorImpl &tensor) {
    Span span = {};
    const c10::StorageImpl *storage = look(tensor, 0, &span);
    return storage == nullptr || span.end_bytes <= storage->nbytes();
}

// Return the address of a storage's memory, also of one that may not be read now.
inline void *address_of(const c10::StorageImpl *storage) {
    return const_cast<c10::StorageImpl *>(storage)->_mutable_data_ptr_no_checks().get();
}
// Let reading the address of a storage raise torch's error, with what to do instead; or not.
void storage_seal(c10::StorageImpl *storage, bool is_closed);

// Return whether a mode or function transform of the user would see an operator on this thread.
bool is_observed();

// Count the references to a storage, without its Python wrapper if no Python code uses the wrapper.
// Needs the GIL, or waits for it.
std::size_t count_holders(c10::StorageImpl *storage);
// Return whether a storage has a Python wrapper: freeing the storage then needs Python.
bool is_known_to_python(c10::StorageImpl *storage);

// Give an alias a storage, and reduce its offset by `shift` elements; null: an empty storage.
void exchange_storage(c10::TensorImpl *alias, c10::StorageImpl *storage, std::int64_t shift);

// Make a storage with new memory from torch's allocator, on this thread's current stream; the
// caller owns it. Throws torch's error if the allocation fails.
c10::StorageImpl *storage_new(std::size_t nbytes, c10::Device device);

} // namespace swapkit

extern "C" {

// Add or drop a reference to a storage, on any thread.
void swapkit_storage_hold(c10::StorageImpl *storage);
void swapkit_storage_drop(void *storage);

} // extern "C"

#endif
