// thread_stacks.hpp - what runs on the stacks of threads (`torch_compat/thread_stacks.py`), read
// without letting one go on.
#ifndef SWAPKIT_THREAD_STACKS_HPP
#define SWAPKIT_THREAD_STACKS_HPP

#include "python/python.hpp"

namespace swapkit {

// stacks() -> of each other thread the (code, globals) of its frames, innermost first.
// receivers(thread, code) -> `self` in each frame of a thread that runs a code, likewise.
// Any thread that has the interpreter, which they do not let go of; no lock is taken.
extern PyMethodDef stack_functions[];

} // namespace swapkit

#endif
