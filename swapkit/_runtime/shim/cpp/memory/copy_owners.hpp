// copy_owners.hpp - owners of copies: each keeps a storage and its memory while a copy uses them.
//
// A program may exchange the memory of a storage while a copy uses it (`share_memory_`,
// `untyped_storage().resize_`). On a device with streams, the allocator reuses the old memory only
// after the copy. On the CPU the old memory would be freed at once, and the copy thread would use
// memory that the pool has moved or freed. So on the CPU a storage and its copies share the memory.
#ifndef SWAPKIT_COPY_OWNERS_HPP
#define SWAPKIT_COPY_OWNERS_HPP

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace swapkit {

// Return an identifier of a storage's memory; it changes when the memory is exchanged, and when
// `note_written` was called. While a copy's owner lives, no other memory gets the same identifier;
// on the CPU, none ever does.
std::uint64_t memory_of(const c10::StorageImpl *storage);

// Note that a kernel that torch does not run may have written to a storage: copies made before do
// not have its bytes. Any thread.
void note_written(const c10::StorageImpl *storage);

} // namespace swapkit

extern "C" {

// Make an owner for a copy from or to a storage. The owner holds the storage and its current
// memory. Drop the owner like a storage (`swapkit_storage_drop`). Needs the GIL: one thread at a
// time may change how a storage holds its memory.
c10::StorageImpl *swapkit_owner_new(c10::StorageImpl *storage);

} // extern "C"

#endif
