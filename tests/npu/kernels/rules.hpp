// What NPU kernels do that the operators here do, too.

#pragma once

#include "kernels/platform.hpp"

#include <cstddef>

namespace simulated {

constexpr size_t kOverRead = 32; // they may read so many bytes past a tensor's last
constexpr int kRefused = 507899; // ACL_ERROR_RT_DRV_INTERNAL_ERROR
constexpr CUresult kException = static_cast<CUresult>(507035); // ..._VECTOR_CORE_EXCEPTION

} // namespace simulated
