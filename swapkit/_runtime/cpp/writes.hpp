// writes.hpp - who is told of this thread's operators that change something in place.
//
// Operators are seen that somebody has named (`capturing.hpp`).
#ifndef SWAPKIT_WRITES_HPP
#define SWAPKIT_WRITES_HPP

#include "recipes.hpp"

namespace swapkit {

// Whether anybody on this thread is told. Without the interpreter.
bool is_watched();
// Tell of one run that is about to begin. Throws if that raised.
void tell_write(const Named *named);

extern PyMethodDef writes_functions[];

} // namespace swapkit

#endif
