// What torch's own CUDA operators cost on the virtual GPU.
//
// The operators run as they are, with all that they do on the host: shapes, allocations, choices of
// kernels, launches. Nothing is computed: the runtime counts what they launch. Around each operator
// is a frame (runtime/timed.h) that says how many bytes it reads and writes, or how many operations
// attention takes. Products of matrices say that themselves (runtime/blas).

#include "kernels/registering.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

extern "C" {
#include "runtime/timed.h"
}

namespace {

using torch::jit::Stack;

struct Runtime {
    decltype(&cusimrt_frame) frame;
    decltype(&cusimrt_flush) flush;

    static const Runtime &get() {
        static const Runtime runtime;
        return runtime;
    }

  private:
    Runtime() {
        frame = reinterpret_cast<decltype(frame)>(dlsym(RTLD_DEFAULT, "cusimrt_frame"));
        flush = reinterpret_cast<decltype(flush)>(dlsym(RTLD_DEFAULT, "cusimrt_flush"));
        TORCH_CHECK(frame != nullptr && flush != nullptr, "the simulated runtime is not loaded");
    }
};

class Frame {
  public:
    explicit Frame(const char *name) : top_(Runtime::get().frame()) {
        Runtime::get().flush(); // what came before in the operator around this one
        frame_.above = *top_;
        frame_.work.kind = CUSIM_MEMORY;
        frame_.work.name = name;
        *top_ = &frame_;
    }
    ~Frame() {
        Runtime::get().flush();
        *top_ = frame_.above;
    }
    Frame(const Frame &) = delete;
    Frame &operator=(const Frame &) = delete;

    cusim_work &work() { return frame_.work; }

  private:
    struct cusimrt_frame **top_;
    struct cusimrt_frame frame_{};
};

// Of an expanded tensor only what there is.
uint64_t bytes_of(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
        return 0;
    }
    auto *impl = tensor.unsafeGetTensorImpl();
    uint64_t bytes = static_cast<uint64_t>(impl->numel()) * impl->itemsize();
    return std::min<uint64_t>(bytes, impl->has_storage() ? impl->storage().nbytes() : bytes);
}

uint64_t bytes_of(const c10::IValue &value) {
    if (value.isTensor()) {
        return bytes_of(value.toTensor());
    }
    uint64_t total = 0;
    if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorList()) {
            total += bytes_of(tensor);
        }
    }
    return total;
}

// Of query times key, and of that times value. Both lie as batch, tokens, heads, width.
double attention_flops(const at::Tensor &query, const at::Tensor &key, bool causal) {
    if (query.dim() != 4) {
        return 0;
    }
    double pairs = static_cast<double>(query.size(1)) * static_cast<double>(key.size(1));
    double width = static_cast<double>(query.size(0) * query.size(2) * query.size(3));
    return 4 * pairs * width / (causal ? 2 : 1);
}

constexpr double kBackwardToForward = 2.5; // five products instead of two

// An operator of torch's with a frame around it.
class Counted : public c10::OperatorKernel {
  public:
    Counted(const c10::OperatorHandle &op, c10::SafeKernelFunction kernel)
        : kernel_(std::move(kernel)), name_(op.schema().name()) {
        for (const c10::Argument &argument : op.schema().arguments()) {
            if (argument.name() == "is_causal" || argument.name() == "custom_mask_type") {
                causal_ = times_.size();
            }
            times_.push_back(is_changed(argument) ? 2 : 1);
        }
        for (const c10::Argument &result : op.schema().returns()) {
            fresh_.push_back(result.alias_info() == nullptr);
        }
        // The kernel's own operators; those around it (_scaled_dot_product_...) are left alone.
        if (name_.find("attention_forward") != std::string::npos) {
            kind_ = CUSIM_ATTENTION;
        } else if (name_.find("attention_backward") != std::string::npos) {
            kind_ = CUSIM_ATTENTION_BACKWARD;
        }
    }

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
        Frame frame(name_.c_str());
        const c10::IValue *arguments = stack->data() + stack->size() - times_.size();
        describe(frame.work(), arguments);
        kernel_.callBoxed(op, keys, stack);
        // None of it is charged yet, unless a product took over or the host had to wait.
        if (frame.work().launches > 0 && frame.work().bytes > 0) {
            frame.work().bytes += result_bytes(*stack);
        }
    }

  private:
    // Read and written; a tensor to write into is only written.
    static bool is_changed(const c10::Argument &argument) {
        const c10::AliasInfo *alias = argument.alias_info();
        bool write = alias != nullptr &&
                     (alias->isWrite() ||
                      (!alias->containedTypes().empty() && alias->containedTypes()[0].isWrite()));
        return write && !argument.is_out();
    }

    void describe(cusim_work &work, const c10::IValue *arguments) const {
        for (size_t i = 0; i < times_.size(); i++) {
            work.bytes += times_[i] * bytes_of(arguments[i]);
        }
        if (kind_ == CUSIM_MEMORY) {
            return;
        }
        size_t query = kind_ == CUSIM_ATTENTION ? 0 : 1; // behind the gradient
        work.kind = kind_;
        work.flops = attention_flops(arguments[query].toTensor(), arguments[query + 1].toTensor(),
                                     causal_ > 0 && is_true(arguments[causal_]));
        if (kind_ == CUSIM_ATTENTION_BACKWARD) {
            work.flops *= kBackwardToForward;
        }
    }

    static bool is_true(const c10::IValue &value) {
        return value.isBool() ? value.toBool() : value.isInt() && value.toInt() != 0;
    }

    uint64_t result_bytes(const Stack &stack) const {
        size_t first = stack.size() - fresh_.size();
        uint64_t bytes = 0;
        for (size_t i = 0; i < fresh_.size(); i++) {
            bytes += fresh_[i] ? bytes_of(stack[first + i]) : 0;
        }
        return bytes;
    }

    c10::SafeKernelFunction kernel_;
    std::string name_;
    std::vector<unsigned> times_; // an argument's bytes are moved so often
    std::vector<bool> fresh_;     // results that are not arguments
    size_t causal_ = 0;           // none: queries are the first argument
    cusim_kind kind_ = CUSIM_MEMORY;
};

// Its bytes cross the link if one side is the host's, which the driver charges.
at::Tensor &copy(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
    Frame frame("aten::copy_");
    if (self.is_cuda() && source.is_cuda()) {
        frame.work().bytes = bytes_of(self) + bytes_of(source);
    }
    return at::native::copy_(self, source, non_blocking);
}

// The operators that these call have frames of their own.
bool is_composite(const std::string &name) {
    static const std::unordered_set<std::string> names = {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_efficient_attention_backward",
    };
    return names.count(name) != 0;
}

} // namespace

// Put a frame around every operator of CUDA tensors; return how many those are. Call it once.
extern "C" int costs_install() {
    static auto &library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                               __FILE__, __LINE__);
    auto frame = [](const c10::OperatorHandle &op) -> std::optional<torch::CppFunction> {
        if (is_composite(op.schema().name())) {
            return std::nullopt;
        }
        auto kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
        return torch::CppFunction::makeFromBoxedFunctor(
            std::make_unique<Counted>(op, std::move(kernel)));
    };
    int count =
        simulated::take_over(library, simulated::operator_names(c10::DispatchKey::CUDA), frame);
    library.impl("aten::copy_", copy);
    return count + 1;
}
