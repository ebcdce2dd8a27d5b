// failures.hpp - exceptions that nobody can be handed.
#ifndef SWAPKIT_FAILURES_HPP
#define SWAPKIT_FAILURES_HPP

#include "recompute/recipes.hpp"

namespace swapkit {

// Let an exception that is set be nobody's: torch runs an operator whose capture failed as if it
// had not been named. What a signal handler raised waits for the main thread's next instruction of
// Python.
void swallow(const Named *named);
// Likewise where no code of ours raises: a signal handler has, or another thread has set it for
// this one (`PyThreadState_SetAsyncExc`), where it waits for the next instruction of Python, too.
void put_off(const Named *named);

} // namespace swapkit

#endif
