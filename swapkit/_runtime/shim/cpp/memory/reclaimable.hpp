// reclaimable.hpp - storages that were copied ahead and can be freed without Python.
//
// Torch's own allocator starts a rescue on any thread, with its lock held. The rescue must not wait
// for the GIL: the thread that holds the GIL may wait for that lock. So if torch's allocator stays
// in place, a storage that is copied ahead is made *reclaimable* at once: its group and the aliases
// drop it, and only the copy and later this list hold it. A group that needs the storage again
// finds it here, unless a rescue has taken it: then the bytes come back from the copy.
//
// One mutex guards the list. No thread frees a storage or calls Python while holding the mutex.
#ifndef SWAPKIT_RECLAIMABLE_HPP
#define SWAPKIT_RECLAIMABLE_HPP

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

struct sk_group;

namespace swapkit {

// Add a storage whose copy is under way and that has no Python wrapper; `native` is the copy's
// group.
void reclaimable_expect(c10::StorageImpl *storage, sk_group *native, c10::Device device);
// Remove a storage: its group has it again, or is being destroyed. Drops the list's reference.
void reclaimable_forget(c10::StorageImpl *storage);
// Take the memory of a storage that a copy has filled: the copy's thread may be about to drop it.
c10::DataPtr reclaimable_empty(c10::StorageImpl *storage);
// Drop the storages that the copy threads could not drop. Needs the GIL.
void reclaimable_sweep();
// Return how many storages wait for `reclaimable_sweep`. Any thread.
std::size_t reclaimable_garbage();
// Free storages whose copies are done, oldest first, until `needed_bytes` are free. Wait for copies
// under way if they can free more. Returns the bytes freed.
std::size_t reclaimable_take(c10::Device device, std::size_t needed_bytes);

// ---- torch's own allocator runs out of memory ---------------------------------------------------

// Set how much torch's CUDA allocator may reserve on a device; 0: no limit, and no rescue.
void rescue_limit(std::int8_t index, std::size_t limit_bytes);
void rescue_switch(std::int8_t index, bool on);
// Raise the largest expected request to at least `nbytes`.
void rescue_expect(std::int8_t index, std::size_t nbytes);
// Return how many rescues have freed memory, and how many bytes.
void rescue_counts(std::int8_t index, std::uint64_t *rescues, std::uint64_t *nbytes);
// Register a callback that torch's allocator calls when it finds no memory. Throws on failure.
void rescue_register();

} // namespace swapkit

extern "C" {

// Like `swapkit_storage_drop`, for the owners of copies if storages are reclaimable.
void swapkit_storage_arrived(void *storage);

} // extern "C"

#endif
