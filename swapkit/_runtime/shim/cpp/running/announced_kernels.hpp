// announced_kernels.hpp - kernels that torch does not run and that announce themselves.
//
// The shim is the listener of the hooks (`swapkit_hooks.h`), for C++ and for `swapkit.op` alike.
// While such a kernel runs, it holds the storages of its operands: no rescue frees a storage that
// others hold, and no planned release frees its memory. The kernel may write to its operands and
// outputs, and no version counts that. So recipes that read or make these storages are settled, and
// copies of them count as outdated, those made meanwhile too.
//
// Any thread may call the hooks. A call takes the GIL, and holds the runtime's lock while it
// settles recipes or searches groups; it holds neither between two calls.
#ifndef SWAPKIT_ANNOUNCED_KERNELS_HPP
#define SWAPKIT_ANNOUNCED_KERNELS_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyMethodDef kernel_functions[];

} // namespace swapkit

#endif
