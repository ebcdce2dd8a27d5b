// trap.cpp - the dispatch key of tensors whose storages are held, and its kernel.
//
// Below autograd and autocast an operator may be replaced by others, and its operands by their
// casts. So the key is one above them: the kernel sees each operator as the program has called it.
// Operators that torch takes apart come by again, part by part. Neither of the keys has a kernel in
// torch: one is for a library that is not developed any more, the other one for torch's own tests.
#include "held/held.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

using c10::DispatchKey;

constexpr std::array keys{DispatchKey::DeferredInit, DispatchKey::TESTING_ONLY_GenericWrapper};
std::atomic<DispatchKey> taken{DispatchKey::Undefined};

// How many operators with held operands, and regions, run on this thread, one inside of the other.
thread_local std::size_t running = 0;

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
    bool is_torchs = op.schema().name().rfind("aten::", 0) == 0;
    return is_torchs && !has_own &&
                   op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)
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

// Return whether an operator does the same with each element of its lists.
bool is_each(const c10::OperatorHandle &op) {
    const std::string &name = op.schema().name();
    return name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::_fused_adam", 0) == 0 ||
           name.rfind("aten::_fused_sgd", 0) == 0 || name.rfind("aten::_fused_adagrad", 0) == 0 ||
           name.rfind("aten::_amp_foreach_", 0) == 0;
}

struct Kind {
    Access access;
    bool is_collective, is_each, is_copy;
};

const Kind &kind_of(const c10::OperatorHandle &op) {
    thread_local std::unordered_map<const c10::FunctionSchema *, Kind> known;
    auto found = known.find(&op.schema());
    if (found == known.end()) {
        bool is_copy = op.schema().name() == "aten::copy_";
        Kind kind{find_access(op), is_collective(op), is_each(op), is_copy};
        found = known.emplace(&op.schema(), kind).first;
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
        uses->add(impl->unsafe_storage().unsafeGetStorageImpl(), writes, running == 0);
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

using Values = std::vector<c10::IValue>;

// The elements of the lists that an operator is given, and what fits at once.
struct Elements {
    std::vector<std::size_t> sizes; // in bytes, of all tensors at each place
    std::size_t total = 0, most = 0;
};

Elements elements_of(const Values &given) {
    Elements found;
    for (const c10::IValue &value : given) {
        auto list = value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
        found.sizes.resize(std::max(found.sizes.size(), list.size()));
        for (std::size_t i = 0; i < list.size(); i++) {
            found.sizes[i] += list[i].nbytes();
            found.total += list[i].nbytes();
            found.most = std::max(found.most, held_most_bytes(*list[i].unsafeGetTensorImpl()));
        }
    }
    return found;
}

// Return a part of the lists that have `count` elements, and all other values.
Values part_of(const Values &given, std::size_t count, std::size_t first, std::size_t end) {
    Values part;
    for (const c10::IValue &value : given) {
        if (value.isList() && value.toListRef().size() == count) {
            c10::impl::GenericList all = value.toList();
            c10::impl::GenericList some(all.elementType());
            for (std::size_t i = first; i < end; i++) {
                some.push_back(all.get(i));
            }
            part.emplace_back(std::move(some));
        } else {
            part.push_back(value);
        }
    }
    return part;
}

// Run an operator on parts of its lists, one after the other, if weights among their elements are
// too large to be here at once. Return whether it was necessary.
bool run_in_parts(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    auto first_argument =
        stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
    const Values given(first_argument, stack->end());
    const Elements elements = elements_of(given);
    std::size_t count = elements.sizes.size();
    if (elements.most == 0 || elements.total <= elements.most || count < 2) {
        return false;
    }
    stack->erase(first_argument, stack->end());
    std::vector<at::Tensor> results;
    for (std::size_t first = 0, end = 0; first < count; first = end) {
        std::size_t nbytes = 0;
        do {
            nbytes += elements.sizes[end++];
        } while (end < count && nbytes + elements.sizes[end] <= elements.most);
        Values part = part_of(given, count, first, end);
        op.callBoxed(&part); // comes by here again
        for (const c10::IValue &made : part) {
            for (const at::Tensor &each : made.toTensorVector()) {
                results.push_back(each);
            }
        }
    }
    if (!op.schema().returns().empty()) {
        stack->emplace_back(std::move(results));
    }
    return true;
}

// Return what an operator does with its operands here. Where autograd does not see operators, as in
// inference mode, a dispatch mode gets them whole, and runs them without the key.
Access access_of(const Kind &kind) {
    bool is_whole = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutogradFunctionality);
    return kind.access == Access::numbers && is_whole ? Access::all : kind.access;
}

void trap(const c10::OperatorHandle &op, c10::DispatchKeySet keyset, torch::jit::Stack *stack) {
    const Kind &kind = kind_of(op);
    if (kind.is_each && run_in_parts(op, stack)) {
        return;
    }
    const Access access = access_of(kind);
    HeldUses uses;
    const auto &arguments = op.schema().arguments();
    std::size_t first = stack->size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); i++) {
        bool is_viewed = access == Access::others && arguments[i].alias_info() != nullptr;
        if (!is_viewed) {
            add((*stack)[first + i], access, is_written(arguments[i]), &uses);
        }
    }
    uses.bring();
    if (kind.is_collective) {
        uses.keep();
    }
    FilePart part;
    if (kind.is_copy) {
        c10::TensorImpl *source = (*stack)[first + 1].unsafeToTensorImpl();
        if (is_filled_by(*(*stack)[first].unsafeToTensorImpl(), *source)) {
            part = file_of(*source);
        }
    }
    {
        Running counted(!uses.is_empty());
        op.redispatchBoxed(
            keyset & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, taken.load()), stack);
    }
    if (!part.path.empty()) {
        held_loaded(*stack->back().toTensor().unsafeGetTensorImpl(), std::move(part));
    }
    uses.finish();
}

} // namespace

Running::Running(bool is_counted) : is_counted_(is_counted) { running += is_counted_ ? 1 : 0; }

Running::~Running() { running -= is_counted_ ? 1 : 0; }

DispatchKey held_key() { return taken.load(std::memory_order_relaxed); }

bool trap_exclude(bool is_excluded) {
    DispatchKey key = held_key();
    if (key == DispatchKey::Undefined) {
        return is_excluded;
    }
    bool was_excluded = c10::impl::tls_is_dispatch_key_excluded(key);
    c10::impl::tls_set_dispatch_key_excluded(key, is_excluded);
    return was_excluded;
}

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
