// Operators of torch's CUDA tensors, computed by torch's CPU kernels in the stream.

#include "kernels/operator.hpp"
#include "kernels/registering.hpp"

#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <string>

namespace {

using namespace simulated;

constexpr CUresult kAssert = static_cast<CUresult>(710); // CUDA_ERROR_ASSERT

CUstream handle_of(const c10::Stream &stream) {
    return static_cast<CUstream>(stream.native_handle());
}

// The runtime's call makes the thread's context, without which the driver refuses.
void submit(const std::string &name, Submission submission) {
    static const auto free = reinterpret_cast<int (*)(void *)>(dlsym(RTLD_DEFAULT, "cudaFree"));
    TORCH_CHECK(free != nullptr, "the simulated runtime is not loaded");
    (void)free(nullptr);
    CUresult result = submission();
    TORCH_CHECK(result == kSuccess, "CUDA error: the simulated driver refused ", name,
                " with code ", static_cast<int>(result), ": ", Driver::get().refusal());
}

// Whether torch moves bytes as they are.
bool is_plain(const at::Tensor &to, const at::Tensor &from) {
    return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
           to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
           to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

// Between device and host torch needs no kernel; between two devices it does unless the bytes are
// only moved.
at::Tensor &copy(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
    if (!self.is_cuda() || !source.is_cuda() || is_plain(self, source)) {
        return at::native::copy_(self, source, non_blocking);
    }
    if (self.device() == source.device()) {
        static const c10::OperatorHandle op =
            c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
        (void)Operator(op, {self, source, non_blocking}).call();
        return self;
    }
    at::Tensor sent = source.to(self.scalar_type()).expand_as(self).contiguous();
    at::Tensor received = at::empty(self.sizes(), self.options());
    at::native::copy_(received, sent, non_blocking);
    return self.copy_(received);
}

} // namespace

const Platform &simulated::platform() {
    static const Platform cuda = {
        .device = at::kCUDA,
        .key = c10::DispatchKey::CUDA,
        .blocking = "CUDA_LAUNCH_BLOCKING",
        .over_read = 0,
        .failed = kAssert,
        .handle = handle_of,
        .submit = submit,
    };
    return cuda;
}

// Take over every operator that torch registers for CUDA and has a CPU kernel for; return how many.
extern "C" int operators_install() {
    // Never destroyed: the dispatcher may be gone before.
    static auto &library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                               __FILE__, __LINE__);
    auto names = simulated::operator_names(c10::DispatchKey::CUDA);
    names.push_back({"aten::convolution", ""}); // else torch looks for a kernel by itself
    auto on_cpu = [](const c10::OperatorHandle &op) -> std::optional<torch::CppFunction> {
        if (op.schema().name() == "aten::native_dropout" ||
            !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
            return std::nullopt;
        }
        return torch::CppFunction::makeFromBoxedFunction<&boxed>();
    };
    int count = simulated::take_over(library, names, on_cpu);
    library.impl("aten::copy_", copy);
    library.impl("aten::native_dropout", dropout);
    return count + 2;
}
