// descriptions.cpp - the descriptions of torch_npu's storages.
//
// torch_npu exports no function that copies a description, and its headers need CANN's. So its
// class is declared here a second time; `torch_compat/accelerators.py` compares what is read
// through it with what torch_npu says, before a storage is moved.
#include "memory/descriptions.hpp"

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>
#include <c10/util/typeid.h>

namespace swapkit {

namespace {

constexpr unsigned most_sizes = 5;
using Sizes = c10::SmallVector<std::int64_t, most_sizes>;

// Formats of ACL whose bytes lie as the strides say.
constexpr int format_nchw = 0, format_nd = 2;

struct Empty {};

} // namespace

// As `torch_npu::NPUStorageDesc` in torch_npu/csrc/core/NPUStorageImpl.h.
struct Description {
    Sizes sizes, strides, storage_sizes;
    std::int64_t offset;
    Empty dtype;
    int origin_format, format;
    caffe2::TypeMeta item;
};

namespace {

// The first members of `torch_npu::NPUStorageImpl`; never made here.
struct DescribedStorage : public c10::StorageImpl {
    DescribedStorage() = delete;
    Description description;
};

bool is_described(const c10::StorageImpl *storage) {
    return storage->device_type() == c10::DeviceType::PrivateUse1;
}

const Description &description_in(const c10::StorageImpl *storage) {
    return static_cast<const DescribedStorage *>(storage)->description;
}

} // namespace

Description *description_of(const c10::StorageImpl *storage) {
    return is_described(storage) ? new Description(description_in(storage)) : nullptr;
}

void description_free(Description *description) { delete description; }

bool has_plain_format(const c10::StorageImpl *storage) {
    int format = is_described(storage) ? description_in(storage).format : format_nd;
    return format == format_nd || format == format_nchw;
}

void describe(c10::StorageImpl *storage, const Description *description) {
    if (description == nullptr) {
        return;
    }
    auto &target = static_cast<DescribedStorage *>(storage)->description;
    target = *description;
    std::size_t item_bytes = description->item.itemsize();
    auto items = static_cast<std::int64_t>(storage->nbytes() / item_bytes);
    if (items < c10::multiply_integers(target.storage_sizes)) {
        // A part, described as torch_npu describes a storage that was resized.
        target.sizes = target.storage_sizes = {items};
        target.strides = {1};
    }
}

DescribedSizes described_sizes(const Description *description) {
    auto all = [](const Sizes &sizes) { return std::vector(sizes.begin(), sizes.end()); };
    return {.sizes = all(description->sizes),
            .strides = all(description->strides),
            .storage_sizes = all(description->storage_sizes),
            .format = description->format,
            .item_bytes = description->item.itemsize()};
}

} // namespace swapkit
