// reclaimable.hpp - storages that were copied ahead and can be taken without Python.
//
// Torch's own allocator asks for memory with its lock held, from any thread: whoever answers may
// not wait for the interpreter, which a thread may have that waits for that lock. So where it stays
// in place, a storage that is being copied ahead is *set aside* at once: its group and the aliases
// let go of it, and what keeps it is the copy, and afterwards this list. A group that needs it
// again finds it here, unless somebody has taken it: then it comes back from its copy.
//
// One mutex guards the list. Nobody frees a storage or calls Python while holding it.
#ifndef SWAPKIT_RECLAIMABLE_HPP
#define SWAPKIT_RECLAIMABLE_HPP

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

struct sk_group;

namespace swapkit {

// Expect a storage whose copy is under way, and that Python does not know; `native` is the copy's
// group.
void aside_expect(c10::StorageImpl *storage, sk_group *native, c10::Device device);
// Forget a storage: its group has it again, or goes. What the list held of it is let go of.
void aside_forget(c10::StorageImpl *storage);
// Let go of what the copies' threads could not. For those who have the interpreter.
void aside_sweep();
// How many storages wait for that, on any thread.
std::size_t aside_garbage();
// Take storages whose copies are done, the oldest first, until so many bytes are free; wait for
// copies under way if that brings more. Returns how many bytes were freed.
std::size_t aside_take(c10::Device device, std::size_t needed_bytes);

// ---- torch's own allocator in want of memory ----------------------------------------------------

// What torch's CUDA allocator may reserve on a device; 0: no limit, and no rescue.
void rescue_limit(std::int8_t index, std::size_t limit_bytes);
void rescue_switch(std::int8_t index, bool on);
// The largest request that is to be expected.
void rescue_expect(std::int8_t index, std::size_t nbytes);
// How many rescues have freed something, and how many bytes.
void rescue_counts(std::int8_t index, std::uint64_t *rescues, std::uint64_t *nbytes);
// Let torch's allocator call us when it finds no memory. Throws if it cannot.
void rescue_register();

} // namespace swapkit

extern "C" {

// As swapkit_storage_drop, for the owners of copies where storages are set aside.
void swapkit_storage_arrived(void *storage);

} // extern "C"

#endif
