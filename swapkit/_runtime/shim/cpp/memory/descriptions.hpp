// descriptions.hpp - what a device's framework knows about a storage beside its bytes.
//
// torch_npu keeps the sizes and the memory format of a storage's tensor in the storage. A storage
// that a copy brings back must have the same description: an operator would read the bytes in
// another order. On other devices there is none.
#ifndef SWAPKIT_DESCRIPTIONS_HPP
#define SWAPKIT_DESCRIPTIONS_HPP

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace swapkit {

struct Description;

// Return a storage's description, owned by the caller; null: its device has none.
Description *description_of(const c10::StorageImpl *storage);
void description_free(Description *description);
// Return whether a part of the bytes can be moved by itself: the format is that of plain strides.
bool has_plain_format(const c10::StorageImpl *storage);
// Describe a new storage that has all bytes of the described one, or a part of them.
void describe(c10::StorageImpl *storage, const Description *description);

// For checks of the layout that is assumed here.
struct DescribedSizes {
    std::vector<std::int64_t> sizes, strides, storage_sizes;
    std::int64_t format;
    std::size_t item_bytes;
};
DescribedSizes described_sizes(const Description *description);

} // namespace swapkit

#endif
