// operators.hpp - the clock of operators, as functions of Python.
#ifndef SWAPKIT_OPERATORS_HPP
#define SWAPKIT_OPERATORS_HPP

#include "python.hpp"

namespace swapkit {

extern PyMethodDef clock_functions[];

// While there is one of these, this thread's operators are our own, and the clock does not ring:
// what it wakes might move the very storage at hand.
class OwnOperators {
  public:
    OwnOperators();
    ~OwnOperators();
    OwnOperators(const OwnOperators &) = delete;
    OwnOperators &operator=(const OwnOperators &) = delete;
};

} // namespace swapkit

#endif
