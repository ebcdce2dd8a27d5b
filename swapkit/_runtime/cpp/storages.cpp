// storages.cpp - what saved tensors need of torch below Python: looking at a tensor in one call,
// and giving an alias another storage.
//
// An alias is a detached tensor that shares the saved tensor's version counter. Its storage is
// exchanged for an empty one while the bytes are elsewhere, and for a new one when they are back;
// sizes, strides, offset, conjugate and negative bits stay with it all the while. Nobody but the
// saved tensor's handle sees an alias, so nobody reads one without memory.
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// By functionality, whatever the device. Kinds of tensors whose bytes are not simply those of their
// storage:
constexpr DispatchKeySet foreign({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::FuncTorchBatched,
    DispatchKey::FuncTorchGradWrapper,
    DispatchKey::Functionalize,
    DispatchKey::ZeroTensor,
    DispatchKey::NestedTensor,
    DispatchKey::Quantized,
    DispatchKey::Sparse,
    DispatchKey::SparseCsr,
    DispatchKey::MkldnnCPU,
});

// What stands between an operator of ours and the device: modes and function transforms.
constexpr DispatchKeySet modes({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::FuncTorchDynamicLayerFrontMode,
    DispatchKey::FuncTorchVmapMode,
    DispatchKey::Functionalize,
});

thread_local std::string storage_error;

bool is_plain(c10::TensorImpl &tensor) {
    return !tensor.key_set().has_any(foreign) && tensor.layout() == c10::kStrided &&
           !tensor.is_inference() && tensor.has_storage();
}

} // namespace

extern "C" {

struct swapkit_facts {
    void *storage;           // borrowed
    std::size_t begin_bytes; // the part of the storage that the tensor views
    std::size_t end_bytes;
    std::size_t storage_bytes;
    std::int32_t device_type;
    std::int32_t modes_are_active; // on this thread
};

// Look at a tensor. False: it is not plain strided memory of at least `least_bytes`.
bool swapkit_tensor_look(c10::TensorImpl *tensor, std::size_t least_bytes,
                         swapkit_facts *out) noexcept {
    if (!is_plain(*tensor)) {
        return false;
    }
    c10::StorageImpl *storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (storage == nullptr || storage->nbytes() < least_bytes ||
        c10::impl::cow::is_cow_data_ptr(storage->data_ptr())) {
        return false;
    }
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < tensor->dim(); i++) {
        if (tensor->size(i) == 0) {
            return false;
        }
        last += (tensor->size(i) - 1) * tensor->stride(i);
    }
    std::size_t item = tensor->itemsize();
    out->storage = storage;
    out->begin_bytes = static_cast<std::size_t>(tensor->storage_offset()) * item;
    out->end_bytes = out->begin_bytes + static_cast<std::size_t>(last + 1) * item;
    out->storage_bytes = storage->nbytes();
    out->device_type = static_cast<std::int32_t>(tensor->device_type());
    c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    out->modes_are_active = local.included_.has_any(modes) ? 1 : 0;
    return true;
}

// Give an alias the storage, from `shift` elements earlier on; null: an empty one.
void swapkit_alias_exchange(c10::TensorImpl *alias, c10::StorageImpl *storage, std::int64_t shift) {
    alias->set_allow_tensor_metadata_change(true);
    c10::Storage fresh;
    if (storage == nullptr) {
        fresh = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, alias->device()), nullptr,
            false));
    } else {
        fresh = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
    }
    if (shift != 0) {
        alias->set_storage_offset(alias->storage_offset() - shift);
    }
    alias->set_storage_keep_dtype(std::move(fresh));
}

// A storage of its own with new memory from torch's allocator; the caller holds it. Null: there is
// no memory, and swapkit_storage_error() says what torch would have raised.
c10::StorageImpl *swapkit_storage_new(std::size_t nbytes, std::int32_t device_type) {
    auto type = static_cast<c10::DeviceType>(device_type);
    try {
        c10::Allocator *allocator =
            type == c10::DeviceType::CPU ? c10::GetCPUAllocator() : c10::GetAllocator(type);
        return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                     allocator, /*resizable=*/false)
            .release();
    } catch (const c10::Error &error) {
        storage_error = error.what_without_backtrace();
        return nullptr;
    }
}

const char *swapkit_storage_error() { return storage_error.c_str(); }

// One more holder of a storage, and one less, on any thread.
void swapkit_storage_hold(c10::StorageImpl *storage) { c10::raw::intrusive_ptr::incref(storage); }

void swapkit_storage_drop(void *storage) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl *>(storage));
}

} // extern "C"
