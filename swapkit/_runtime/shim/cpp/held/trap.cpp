// trap.cpp - the dispatch key of tensors whose storages are held, and its kernel.
//
// Below autograd and autocast an operator may be replaced by others, and its operands by their
// casts. So the key is one above them: the kernel sees each operator as the program has called it.
// Operators that torch takes apart come by again, part by part. Neither of the keys has a kernel in
// torch: one is for a library that is not developed any more, the other one for torch's own tests.
#include "held/held.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace swapkit {

namespace {

using c10::DispatchKey;

constexpr std::array keys{DispatchKey::DeferredInit, DispatchKey::TESTING_ONLY_GenericWrapper};
std::atomic<DispatchKey> taken{DispatchKey::Undefined};

// What an operator does with its operands.
enum class Access : std::uint8_t {
    all,    // uses their bytes
    others, // makes views, and uses the bytes of those that it does not view
    numbers // torch takes it apart, and itself reads only whole numbers, such as lengths
};

Access find_access(const c10::OperatorHandle &op) {
    for (const c10::Argument &result : op.schema().returns()) {
        if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
            return Access::others;
        }
    }
    constexpr std::array devices{DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::PrivateUse1};
    bool has_own = false;
    for (DispatchKey device : devices) {
        has_own = has_own || op.hasKernelForDispatchKey(device);
    }
    return !has_own && op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)
               ? Access::numbers
               : Access::all;
}

// Return whether an operator changes an operand. Batch norms do not declare their statistics.
bool is_written(const c10::Argument &argument) {
    const c10::AliasInfo *alias = argument.alias_info();
    return (alias != nullptr && alias->isWrite()) || argument.name().rfind("running_", 0) == 0;
}

// Return whether other threads use the operands of an operator after it has returned.
bool is_collective(const c10::OperatorHandle &op) {
    return op.schema().name().rfind("c10d::", 0) == 0;
}

struct Kind {
    Access access;
    bool is_collective;
};

const Kind &kind_of(const c10::OperatorHandle &op) {
    thread_local std::unordered_map<const c10::FunctionSchema *, Kind> known;
    auto found = known.find(&op.schema());
    if (found == known.end()) {
        found = known.emplace(&op.schema(), Kind{find_access(op), is_collective(op)}).first;
    }
    return found->second;
}

void add_one(const c10::IValue &value, Access access, bool writes, HeldUses *uses) {
    if (!value.isTensor()) {
        return;
    }
    const c10::TensorImpl *impl = value.unsafeToTensorImpl();
    if (is_trapped(*impl) && impl->has_storage() &&
        (access != Access::numbers ||
         c10::isIntegralType(c10::typeMetaToScalarType(impl->dtype()), /*includeBool=*/true))) {
        uses->add(impl->unsafe_storage().unsafeGetStorageImpl(), writes);
    }
}

void add(const c10::IValue &value, Access access, bool writes, HeldUses *uses) {
    if (!value.isTensorList() && !value.isOptionalTensorList()) {
        add_one(value, access, writes, uses);
        return;
    }
    for (const c10::IValue &each : value.toListRef()) {
        add_one(each, access, writes, uses);
    }
}

void trap(const c10::OperatorHandle &op, c10::DispatchKeySet keyset, torch::jit::Stack *stack) {
    HeldUses uses;
    const Kind &kind = kind_of(op);
    const auto &arguments = op.schema().arguments();
    std::size_t first = stack->size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); i++) {
        bool is_viewed = kind.access == Access::others && arguments[i].alias_info() != nullptr;
        if (!is_viewed) {
            add((*stack)[first + i], kind.access, is_written(arguments[i]), &uses);
        }
    }
    uses.bring();
    if (kind.is_collective) {
        uses.keep();
    }
    op.redispatchBoxed(keyset & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, taken.load()),
                       stack);
}

} // namespace

DispatchKey held_key() { return taken.load(std::memory_order_relaxed); }

bool trap_register() {
    if (taken != DispatchKey::Undefined) {
        return true;
    }
    auto &dispatcher = c10::Dispatcher::singleton();
    for (DispatchKey key : keys) {
        if (!dispatcher.hasBackendFallbackForDispatchKey(key)) {
            taken = key;
            // Never unregistered: other threads may be inside the kernel.
            static auto &registered = *new c10::RegistrationHandleRAII(dispatcher.registerFallback(
                key, c10::KernelFunction::makeFromBoxedFunction<&trap>(), "swapkit: weights"));
            (void)registered;
            return true;
        }
    }
    PyErr_SetString(PyExc_RuntimeError,
                    "swapkit: weights cannot leave the device: other libraries have registered "
                    "kernels for the dispatch keys DeferredInit and TESTING_ONLY_GenericWrapper");
    return false;
}

} // namespace swapkit
