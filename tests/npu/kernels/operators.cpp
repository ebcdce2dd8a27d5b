// Operators of torch_npu's tensors, computed by torch's CPU kernels in the stream.
//
// As an operator of torch_npu's own, one goes into the queue of the host (TASK_QUEUE_ENABLE): its
// consumer thread submits the work to the stream, which the handle was taken of when the operator
// was called. Copies, casts, views, sizes of storages and memory stay torch_npu's.

#include "kernels/operator.hpp"
#include "kernels/registering.hpp"
#include "rules.hpp"

#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <semaphore.h>

#include <cstdio>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

namespace {

using namespace simulated;

CUstream handle_of(const c10::Stream &stream) {
    return static_cast<CUstream>(c10_npu::NPUStream(stream).stream(false));
}

// Called by any thread that calls an operator. What is submitted runs on the queue's consumer
// thread, or at once where there is no queue.
void submit(const std::string &name, Submission submission) {
    at_npu::native::OpCommand::RunOpApiV2(
        name, [name, submission = std::move(submission)]() -> int {
            CUresult result = submission();
            if (result == kSuccess) {
                return 0;
            }
            (void)std::fprintf(stderr, "simulated operator %s was refused: %s\n", name.c_str(),
                               Driver::get().refusal());
            return kRefused;
        });
}

// Torch's own kernel, for which torch_npu has another.
class Wrapped : public c10::OperatorKernel {
  public:
    explicit Wrapped(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
        kernel_.callBoxed(op, keys, stack);
    }

  private:
    c10::SafeKernelFunction kernel_;
};

torch::CppFunction kernel_of(const c10::OperatorHandle &op, c10::DispatchKey key) {
    return torch::CppFunction::makeFromBoxedFunctor(
        std::make_unique<Wrapped>(op.getComputedKernelForDispatchKey(key)));
}

// Copies and memory, which torch_npu does by calls of the runtime, and by operators that it calls
// without the dispatcher (opapi.cpp).
bool is_kept(const std::string &name) {
    static const std::unordered_set<std::string> names = {
        "aten::_has_compatible_shallow_copy_type",
        "aten::_lazy_clone",
        "aten::_to_copy",
        "aten::clone",
        "aten::contiguous",
        "aten::empty_like",
        "aten::new_empty_strided",
        "aten::resize_as_",
    };
    return names.count(name) != 0;
}

bool makes_tensors(const c10::FunctionSchema &schema) {
    for (const c10::Argument &argument : schema.arguments()) {
        if (argument.name() == "device") {
            return true;
        }
    }
    return false;
}

// Whether torch puts the operator together from others by itself.
bool is_composed(const c10::OperatorHandle &op) {
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
        return false;
    }
    return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
           makes_tensors(op.schema());
}

std::optional<torch::CppFunction> take(const c10::OperatorHandle &op) {
    if (is_kept(op.schema().name()) || op.schema().name() == "aten::native_dropout" ||
        !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
        return std::nullopt;
    }
    if (is_composed(op)) {
        return kernel_of(op, c10::DispatchKey::CPU);
    }
    return torch::CppFunction::makeFromBoxedFunction<&boxed>();
}

// torch_npu's gradients call operators that only it has.
std::optional<torch::CppFunction> take_gradient(const c10::OperatorHandle &op) {
    bool known = op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) ||
                 op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (is_kept(op.schema().name()) || !known) {
        return std::nullopt;
    }
    return kernel_of(op, c10::DispatchKey::AutogradCPU);
}

} // namespace

const Platform &simulated::platform() {
    static const Platform npu = {
        .device = at::kPrivateUse1,
        .key = c10::DispatchKey::PrivateUse1,
        .blocking = "ASCEND_LAUNCH_BLOCKING",
        .over_read = kOverRead,
        .failed = kException,
        .handle = handle_of,
        .submit = submit,
    };
    return npu;
}

// Take over every operator that torch_npu registers and torch has a CPU kernel for; return how
// many. Call it once, when torch_npu is loaded.
extern "C" int operators_install() {
    // Never destroyed: the dispatcher may be gone before.
    static auto &library = *new torch::Library(torch::Library::IMPL, "aten",
                                               c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    static auto &gradients = *new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    auto of_autograd = simulated::operator_names(c10::DispatchKey::AutogradPrivateUse1);
    (void)simulated::take_over(gradients, of_autograd, take_gradient);
    auto names = simulated::operator_names(platform().key);
    int count = simulated::take_over(library, names, take);
    library.impl("aten::native_dropout", dropout);
    return count + 1;
}

// For tests: let the queue's consumer thread wait for a semaphore, so that what is queued behind
// stays there. Where there is no queue the caller waits.
extern "C" void operators_hold_queue(sem_t *semaphore) {
    at_npu::native::OpCommand::RunOpApiV2("hold",
                                          [semaphore]() -> int { return sem_wait(semaphore); });
}
