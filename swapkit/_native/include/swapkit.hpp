// swapkit.hpp - how an operator in C++ announces itself to swapkit; swapkit_hooks.h has the rules.
//
//     std::vector<at::Tensor> gmm(const at::Tensor &x, const at::Tensor &weight) {
//         swapkit::Operator op("gmm");
//         op.reads(x, weight);
//         at::Tensor y = at::empty(...);
//         ... // the kernel
//         op.outputs(y);
//         return {y};
//     }
//
// Header-only, C++17. Link with libswapkit.so. Where nothing needs to follow an operator, a call
// costs nanoseconds. Tensors without memory of their own (undefined, sparse, meta) are passed over.
// A tensor whose storage was freed (FSDP, `resize_(0)`) raises c10::Error; so does a result that
// swapkit cannot keep, as c10::OutOfMemoryError if memory is the reason.
#ifndef SWAPKIT_HPP
#define SWAPKIT_HPP

#include "swapkit_hooks.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>

namespace swapkit {

namespace detail {

inline void require(sk_op_result result) {
    TORCH_CHECK_WITH(OutOfMemoryError, result != SK_OP_OUT_OF_MEMORY, "swapkit: ", sk_op_error());
    TORCH_CHECK(result == SK_OP_OK, "swapkit: ", sk_op_error());
}

// Call `announce` with the memory of a tensor, if it has any.
template <class Announce> void with_memory(const at::Tensor &tensor, const Announce &announce) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta()) {
        return;
    }
    c10::StorageImpl *storage =
        tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    TORCH_CHECK(storage->nbytes() > 0 || tensor.numel() == 0, "swapkit: an operand of shape ",
                tensor.sizes(),
                " has no memory. Restore its storage first, if FSDP or "
                "`resize_(0)` freed it.");
    announce(sk_op_memory{storage->data_ptr().get(), storage->nbytes(), storage, false});
}

template <class Announce>
void with_memory(const std::optional<at::Tensor> &tensor, const Announce &announce) {
    if (tensor.has_value()) {
        with_memory(*tensor, announce);
    }
}

template <class Announce> void with_memory(at::TensorList tensors, const Announce &announce) {
    for (const at::Tensor &each : tensors) {
        with_memory(each, announce);
    }
}

} // namespace detail

// A running operator; ends with the scope, by an exception, too. Each argument of its functions is
// an at::Tensor, an optional one, or a list or vector of tensors. Use it on the thread that made
// it.
class Operator {
  public:
    explicit Operator(const char *name) : token_(sk_op_enter(name)) {}
    explicit Operator(const std::string &name) : Operator(name.c_str()) {}
    ~Operator() { sk_op_leave(token_); }
    Operator(const Operator &) = delete;
    Operator &operator=(const Operator &) = delete;

    // Announce operands that the kernel does not write to.
    template <class... Tensors> void reads(const Tensors &...tensors) {
        (announce(tensors, true, false), ...);
    }
    // Announce operands that the kernel may overwrite, before it runs.
    template <class... Tensors> void operands(const Tensors &...tensors) {
        (announce(tensors, false, false), ...);
    }
    // Announce what the kernel has made or overwritten, after it has run.
    template <class... Tensors> void outputs(const Tensors &...tensors) {
        (announce(tensors, false, true), ...);
    }

  private:
    template <class Tensors> void announce(const Tensors &tensors, bool is_read, bool is_output) {
        if (token_ == 0) {
            return;
        }
        detail::with_memory(tensors, [&](sk_op_memory memory) {
            memory.is_only_read = is_read;
            detail::require((is_output ? sk_op_output : sk_op_operand)(token_, &memory));
        });
    }

    std::uint64_t token_; // 0: nothing follows the operator
};

// The same in the shape of MindSpeed's hooks: BeginHook, TensorHook for each operand, the kernel,
// TensorHook for each output, PostHook, EndHook. One function makes all calls of an operator. A
// tensor that the kernel overwrites is hooked before the kernel. Threads: any; each has its own
// operators.
class SwapManager {
  public:
    [[gnu::always_inline]] static inline SwapManager &GetInstance() {
        static SwapManager instance;
        return instance;
    }
    // Inlined into the function of the operator, whose frame tells whether an exception has left
    // it.
    [[gnu::always_inline]] inline void BeginHook(const char *name) { sk_op_begin(name); }
    [[gnu::always_inline]] inline void BeginHook(const std::string &name) {
        sk_op_begin(name.c_str());
    }
    void TensorHook(const at::Tensor &tensor) { announce(tensor); }
    void TensorHook(const std::optional<at::Tensor> &tensor) { announce(tensor); }
    void TensorHook(at::TensorList tensors) { announce(tensors); }
    void PostHook() { sk_op_post(); }
    [[gnu::always_inline]] inline void EndHook() { sk_op_end(); }

  private:
    template <class Tensors> static void announce(const Tensors &tensors) {
        if (sk_op_depth() == 0) {
            return; // nothing follows operators: a tensor without memory is no error then
        }
        detail::with_memory(tensors, [](const sk_op_memory &memory) {
            detail::require(sk_op_tensor(memory.address, memory.nbytes, memory.storage));
        });
    }
};

} // namespace swapkit

#endif
