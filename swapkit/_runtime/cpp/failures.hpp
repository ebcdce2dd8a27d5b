// failures.hpp - exceptions that nobody can be handed.
#ifndef SWAPKIT_FAILURES_HPP
#define SWAPKIT_FAILURES_HPP

#include "recipes.hpp"

namespace swapkit {

// Let an exception that is set be nobody's: torch runs an operator whose capture failed as if it
// had not been named. What a signal handler raised waits for the main thread's next instruction of
// Python.
void swallow(const Named *named);

} // namespace swapkit

#endif
