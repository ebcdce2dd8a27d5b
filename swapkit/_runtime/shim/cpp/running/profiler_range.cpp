// profiler_range.cpp - named ranges in torch's profiler.
#include "running/profiler_range.hpp"

#include <ATen/record_function.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

namespace swapkit {

namespace {

// Indexed by `RangeName`.
constexpr std::array<const char *, 3> range_names = {"swap_out", "swap_in", "swap_in_wait"};

} // namespace

void *range_begin(RangeName name) {
    std::optional<at::StepCallbacks> callbacks =
        at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) {
        return nullptr;
    }
    auto *range = new at::RecordFunction(std::move(*callbacks));
    range->before(range_names[static_cast<std::size_t>(name)], c10::ArrayRef<const c10::IValue>{});
    return range;
}

void range_end(void *range) { delete static_cast<at::RecordFunction *>(range); }

PyObject *in_range(const char *name, PyObject *function) {
    for (std::size_t at = 0; at < range_names.size(); at++) {
        if (std::strcmp(name, range_names[at]) == 0) {
            ProfilerRange range(static_cast<RangeName>(at));
            return PyObject_CallNoArgs(function);
        }
    }
    return PyErr_Format(PyExc_ValueError, "swapkit has no range %s", name);
}

} // namespace swapkit
