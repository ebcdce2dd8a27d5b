// The tensors of one piece of work, as the queued work knows them.

#pragma once

#include "kernels/platform.hpp"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace simulated {

using c10::IValue;

// A tensor of the host with bytes of its own.
inline at::Tensor copy_of(const at::Tensor &tensor) {
    at::Tensor copy = tensor.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
}

// A tensor as the queued work knows it: where its bytes are and what shape they have. Tensors of
// the host are kept; they are scalars that a kernel would get by value.
struct Slot {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    at::ScalarType dtype = at::kFloat;
    int use = -1; // none: no bytes
    at::Tensor held;
    bool defined = true;

    at::Tensor on_host(void *const *bytes) const {
        if (!defined || held.defined()) {
            return held;
        }
        auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
        return use < 0 ? at::empty_strided(sizes, strides, options)
                       : at::from_blob(bytes[use], sizes, strides, options);
    }

    at::Tensor on_meta() const {
        if (!defined) {
            return held;
        }
        if (held.defined() && held.dim() == 0) {
            return copy_of(held); // what Python sees is Python's, which the work must not wait for
        }
        return at::empty_strided(sizes, strides,
                                 at::TensorOptions().dtype(dtype).device(at::kMeta));
    }
};

// One argument or result: a plain value, or the slots of its tensors.
struct Value {
    enum class Kind { plain, tensor, list, optional_list };
    Kind kind = Kind::plain;
    IValue plain;
    std::vector<size_t> slots;

    template <typename MakeTensor> IValue build(const MakeTensor &make) const {
        switch (kind) {
        case Kind::tensor:
            return make(slots[0]);
        case Kind::list: {
            c10::List<at::Tensor> list;
            for (size_t slot : slots) {
                list.push_back(make(slot));
            }
            return list;
        }
        case Kind::optional_list: {
            c10::List<std::optional<at::Tensor>> list;
            for (size_t slot : slots) {
                at::Tensor tensor = make(slot);
                list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
            }
            return list;
        }
        default:
            return plain;
        }
    }
};

inline size_t extent_bytes(const at::Tensor &tensor) {
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); i++) {
        last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    return static_cast<size_t>(last + 1) * tensor.itemsize();
}

// What a piece of work does with a tensor.
enum class Access { read, write, read_and_write };

// The tensors that one piece of work reads and writes.
class Slots {
  public:
    size_t add(const at::Tensor &tensor, Access access) {
        auto found = known_.find(tensor.unsafeGetTensorImpl());
        if (tensor.defined() && found != known_.end()) {
            const Slot &slot = slots_[found->second];
            if (slot.use >= 0) {
                extend(uses_[slot.use], tensor, access);
            }
            return found->second;
        }
        slots_.push_back(describe(tensor, access));
        if (tensor.defined()) {
            known_[tensor.unsafeGetTensorImpl()] = slots_.size() - 1;
        }
        return slots_.size() - 1;
    }

    std::vector<at::Tensor> on_host(void *const *bytes) const {
        std::vector<at::Tensor> tensors;
        tensors.reserve(slots_.size());
        for (const Slot &slot : slots_) {
            tensors.push_back(slot.on_host(bytes));
        }
        return tensors;
    }

    std::vector<at::Tensor> on_meta() const {
        std::vector<at::Tensor> tensors;
        tensors.reserve(slots_.size());
        for (const Slot &slot : slots_) {
            tensors.push_back(slot.on_meta());
        }
        return tensors;
    }

    // The tensor is not what it was: add it anew.
    void forget(const at::Tensor &tensor) { known_.erase(tensor.unsafeGetTensorImpl()); }

    // The queued work must not know the tensors any more.
    void forget() { known_.clear(); }

    const std::vector<cusim_use> &uses() const { return uses_; }

  private:
    static void extend(cusim_use &use, const at::Tensor &tensor, Access access) {
        use.write = use.write || access != Access::read;
        if (access != Access::write) {
            use.size = extent_bytes(tensor) + platform().over_read;
        }
    }

    Slot describe(const at::Tensor &tensor, Access access) {
        Slot slot;
        slot.defined = tensor.defined();
        if (!slot.defined) {
            return slot;
        }
        slot.sizes = tensor.sizes().vec();
        slot.strides = tensor.strides().vec();
        slot.dtype = tensor.scalar_type();
        if (!is_on_device(tensor)) {
            slot.held = copy_of(tensor);
        } else if (tensor.numel() > 0) {
            slot.use = static_cast<int>(uses_.size());
            auto address = reinterpret_cast<CUdeviceptr>(tensor.const_data_ptr());
            uses_.push_back({address, extent_bytes(tensor), false});
            extend(uses_.back(), tensor, access);
        }
        return slot;
    }

    std::vector<Slot> slots_;
    std::vector<cusim_use> uses_;
    std::unordered_map<const c10::TensorImpl *, size_t> known_;
};

inline Value make_value(Slots &slots, const IValue &argument, Access access) {
    Value value;
    if (argument.isTensor()) {
        value.kind = Value::Kind::tensor;
        value.slots.push_back(slots.add(argument.toTensor(), access));
    } else if (argument.isTensorList()) {
        value.kind = Value::Kind::list;
        for (const at::Tensor &tensor : argument.toTensorVector()) {
            value.slots.push_back(slots.add(tensor, access));
        }
    } else if (argument.isOptionalTensorList()) {
        value.kind = Value::Kind::optional_list;
        for (const std::optional<at::Tensor> &tensor : argument.toOptionalTensorVector()) {
            value.slots.push_back(slots.add(tensor.value_or(at::Tensor()), access));
        }
    } else {
        value.plain = argument;
    }
    return value;
}

} // namespace simulated
