// storages.cpp - inspecting a tensor in one call, exchanging an alias's storage, and our own
// storages.
//
// An alias is a detached tensor that shares the saved tensor's version counter. Its storage is
// exchanged for an empty one while the bytes are elsewhere, and for a new one when they are back.
// Sizes, strides, offset, conjugate and negative bits stay on the alias. Only the saved tensor's
// handle sees an alias, so no code reads one without memory.
#include "memory/storages.hpp"

#include "memory/streams.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// By functionality, for any device. Kinds of tensors whose bytes are not simply the bytes of their
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

// Keys between an operator of ours and the device: modes and function transforms.
constexpr DispatchKeySet modes({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::FuncTorchDynamicLayerFrontMode,
    DispatchKey::FuncTorchVmapMode,
    DispatchKey::Functionalize,
});

bool is_plain(c10::TensorImpl &tensor) {
    return !tensor.key_set().has_any(foreign) && tensor.layout() == c10::kStrided &&
           !tensor.is_inference() && tensor.has_storage() && !tensor.has_symbolic_sizes_strides();
}

// Return whether no Python code uses a storage's wrapper, though the wrapper counts as a reference.
// Newer torch keeps the wrapper as long as the storage lives; older torch only while Python uses
// it.
template <class Storage> bool is_wrapped_for_nobody(Storage *storage) {
    if constexpr (requires { storage->pyobj_slot()->has_unique_reference(); }) {
        return storage->pyobj_slot()->has_unique_reference();
    }
    return false;
}

// Return whether there is a wrapper; the method's name depends on torch's version.
template <class Slot> bool has_object(Slot *slot) {
    if constexpr (requires { slot->load_pyobj(); }) {
        return slot->load_pyobj() != nullptr;
    } else {
        return slot->owns_pyobj();
    }
}

// Return a new storage with this memory; some devices have storages of their own class.
c10::intrusive_ptr<c10::StorageImpl> storage_of(c10::DataPtr memory, std::size_t nbytes,
                                                c10::Allocator *allocator) {
    constexpr c10::StorageImpl::use_byte_size_t in_bytes;
    auto make = c10::GetStorageImplCreate(memory.device().type());
    if (make != nullptr) {
        return make(in_bytes, c10::SymInt(static_cast<std::int64_t>(nbytes)), std::move(memory),
                    allocator, /*resizable=*/false);
    }
    return c10::make_intrusive<c10::StorageImpl>(in_bytes, nbytes, std::move(memory), allocator,
                                                 /*resizable=*/false);
}

// Return an empty storage, one for all aliases of a thread: no code finds an alias by its storage.
c10::Storage empty_storage(c10::Device device) {
    thread_local c10::Storage latest;
    if (!latest || latest.device() != device) {
        latest = c10::Storage(storage_of(c10::DataPtr(nullptr, device), 0, nullptr));
    }
    return latest;
}

} // namespace

namespace swapkit {

c10::StorageImpl *plain_storage(c10::TensorImpl &tensor, std::size_t least_bytes) {
    if (!is_plain(tensor) || tensor.numel() == 0) {
        return nullptr;
    }
    c10::StorageImpl *storage = tensor.unsafe_storage().unsafeGetStorageImpl();
    bool is_one = storage != nullptr && storage->nbytes() >= least_bytes &&
                  !c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks());
    return is_one ? storage : nullptr;
}

c10::StorageImpl *look(c10::TensorImpl &tensor, std::size_t least_bytes, Span *out) {
    c10::StorageImpl *storage = plain_storage(tensor, least_bytes);
    if (storage == nullptr) {
        return nullptr;
    }
    c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    std::int64_t last = 0;
    for (std::size_t i = 0; i < sizes.size(); i++) {
        last += (sizes[i] - 1) * strides[i];
    }
    std::size_t item = tensor.itemsize();
    out->begin_bytes = static_cast<std::size_t>(tensor.storage_offset()) * item;
    out->end_bytes = out->begin_bytes + static_cast<std::size_t>(last + 1) * item;
    return storage;
}

void storage_seal(c10::StorageImpl *storage, bool is_closed) {
    if (is_closed) {
        storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
            "this tensor's bytes leave the device between two uses: swapkit brings them for "
            "torch's operators, but not for code that reads their address. Pass a copy to that "
            "code (`tensor.clone()`), or run it as an operator (`torch.library.custom_op`)");
    } else {
        storage->clear_data_ptr_access_error_msg_();
    }
}

bool is_observed() {
    return at::impl::torch_function_mode_enabled() ||
           c10::impl::tls_local_dispatch_key_set().included_.has_any(modes);
}

std::size_t count_holders(c10::StorageImpl *storage) {
    std::size_t count = c10::raw::intrusive_ptr::use_count(storage);
    return count - (is_wrapped_for_nobody(storage) ? 1 : 0);
}

bool is_known_to_python(c10::StorageImpl *storage) { return has_object(storage->pyobj_slot()); }

void exchange_storage(c10::TensorImpl *alias, c10::StorageImpl *storage, std::int64_t shift) {
    alias->set_allow_tensor_metadata_change(true);
    c10::Storage fresh =
        storage == nullptr
            ? empty_storage(alias->device())
            : c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
    if (shift != 0) {
        alias->set_storage_offset(alias->storage_offset() - shift);
    }
    alias->set_storage_keep_dtype(std::move(fresh));
}

c10::StorageImpl *storage_new(std::size_t nbytes, c10::Device device) {
    c10::OptionalDeviceGuard current;
    if (!device.is_cpu()) {
        current.reset_device(device);
    }
    c10::Allocator *allocator = allocator_of(device.type());
    return storage_of(allocator->allocate(nbytes), nbytes, allocator).release();
}

} // namespace swapkit

void swapkit_storage_hold(c10::StorageImpl *storage) { c10::raw::intrusive_ptr::incref(storage); }

void swapkit_storage_drop(void *storage) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl *>(storage));
}
