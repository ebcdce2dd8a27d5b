// writes.hpp - who is told of what this thread's operators are about to change in place.
//
// Operators are seen that somebody has named (`capturing.hpp`).
#ifndef SWAPKIT_WRITES_HPP
#define SWAPKIT_WRITES_HPP

#include "recipes.hpp"

namespace swapkit {

// Whether anybody on this thread is told. Without the interpreter.
bool is_watched();
// Tell of one run that is about to begin. Throws what was raised.
void tell_writes(const Named *named, const c10::IValue *arguments);

extern PyMethodDef writes_functions[];

} // namespace swapkit

#endif
