// Which of torch's operators of a device are taken over, and how they are registered.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace simulated {

// Those that torch does without device code; `copy_` is registered by itself.
inline bool is_without_kernels(const std::string &name) {
    static const std::unordered_set<std::string> names = {
        "aten::_copy_from",
        "aten::_copy_from_and_resize",
        "aten::_efficientzerotensor",
        "aten::_fused_sdp_choice",
        "aten::_local_scalar_dense",
        "aten::_pin_memory",
        "aten::as_strided_",
        "aten::copy_",
        "aten::empty",
        "aten::empty_strided",
        "aten::is_pinned",
        "aten::is_set_to",
        "aten::record_stream",
        "aten::resize_",
        "aten::set_",
    };
    return names.count(name) != 0;
}

inline bool is_view(const c10::FunctionSchema &schema) {
    for (const c10::Argument &result : schema.returns()) {
        if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
            return true;
        }
    }
    return false;
}

class Silent : public c10::WarningHandler {
    void process(const c10::Warning &warning) override { (void)warning; }
};

using Names = std::vector<c10::OperatorName>;

inline Names operator_names(c10::DispatchKey key) {
    return c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key);
}

// Register what `make` returns for each of these operators, but for views and those without
// kernels; it may return nothing. Returns how many were taken over. That they had a kernel is no
// warning.
template <typename Make>
int take_over(torch::Library &library, const Names &names, const Make &make) {
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    int count = 0;
    for (const c10::OperatorName &name : names) {
        auto op = c10::Dispatcher::singleton().findSchema(name);
        if (!op || name.name.rfind("aten::", 0) != 0 || is_without_kernels(name.name) ||
            is_view(op->schema())) {
            continue;
        }
        std::optional<torch::CppFunction> kernel = make(*op);
        if (kernel) {
            library.impl(c10::toString(name).c_str(), std::move(*kernel));
            count++;
        }
    }
    return count;
}

} // namespace simulated
