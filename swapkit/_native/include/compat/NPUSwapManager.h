// NPUSwapManager.h - the name under which MindSpeed's operators call SmartSwap's hooks.
//
// Put this folder on the include path instead of MindSpeed's, and the sources compile unchanged.
#ifndef SWAPKIT_COMPAT_NPU_SWAP_MANAGER_H
#define SWAPKIT_COMPAT_NPU_SWAP_MANAGER_H

#include "../swapkit.hpp"

namespace c10_npu {
namespace swap {

using NPUSwapManager = ::swapkit::SwapManager;

} // namespace swap
} // namespace c10_npu

#endif
