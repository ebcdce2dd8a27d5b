// failures.hpp - exceptions that cannot be raised in any caller.
#ifndef SWAPKIT_FAILURES_HPP
#define SWAPKIT_FAILURES_HPP

#include "python/python.hpp"

namespace swapkit {

struct Named;

// Return the current exception, and clear it.
Ref<> take_exception();
// Handle the current exception without raising it: torch runs an operator whose capture failed as
// if the operator were not named. A signal handler's exception waits for the main thread's next
// Python instruction.
void swallow(const Named *named);
// Likewise; `where` is the object that a failure is reported for.
void swallow(PyObject *where);
// Like `swallow`, where no code of ours raises: the exception comes from a signal handler, or
// another thread set it for this one (`PyThreadState_SetAsyncExc`). The latter waits for this
// thread's next Python instruction.
void put_off(const Named *named);

} // namespace swapkit

#endif
