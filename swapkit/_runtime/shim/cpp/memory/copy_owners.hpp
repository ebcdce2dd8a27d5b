// copy_owners.hpp - owners of copies: what keeps a storage, and its memory, while a copy uses it.
//
// A program may exchange the memory of a storage while a copy uses it (`share_memory_`,
// `untyped_storage().resize_`). On a device with streams the old memory goes back to its allocator
// behind the copy. On the CPU it would go at once, and the copying thread would use what the pool
// has moved or given back. So there the storage and its copies share the memory.
#ifndef SWAPKIT_COPY_OWNERS_HPP
#define SWAPKIT_COPY_OWNERS_HPP

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace swapkit {

// Which memory a storage has: another value after it was exchanged. While a copy's owner lives,
// no other memory gets that value; on the CPU never.
std::uint64_t memory_of(const c10::StorageImpl *storage);

} // namespace swapkit

extern "C" {

// Make an owner for a copy from or to a storage: it holds the storage and the memory that this has
// now, and is dropped as a storage is (`swapkit_storage_drop`). Needs the interpreter: one thread
// at a time may change how a storage holds its memory.
c10::StorageImpl *swapkit_owner_new(c10::StorageImpl *storage);

} // extern "C"

#endif
