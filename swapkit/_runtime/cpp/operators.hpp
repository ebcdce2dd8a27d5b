// operators.hpp - the clock of operators, as functions of Python.
#ifndef SWAPKIT_OPERATORS_HPP
#define SWAPKIT_OPERATORS_HPP

#include "python.hpp"

namespace swapkit {

extern PyMethodDef clock_functions[];

} // namespace swapkit

#endif
