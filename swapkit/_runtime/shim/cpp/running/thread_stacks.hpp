// thread_stacks.hpp - reading the stacks of other threads (`torch_compat/thread_stacks.py`) while
// none of them runs Python.
#ifndef SWAPKIT_THREAD_STACKS_HPP
#define SWAPKIT_THREAD_STACKS_HPP

#include "python/python.hpp"

namespace swapkit {

// stacks() -> for each other thread, the (code, globals) of its frames, innermost first.
// receivers(thread, code) -> `self` in each frame of a thread that runs `code`, innermost first.
// Any thread that holds the GIL may call them. They do not release the GIL and take no lock.
extern PyMethodDef stack_functions[];

} // namespace swapkit

#endif
