// hidden_operators.hpp - hiding operators from the user's modes, subclasses and transforms
// (`torch_compat/isolation.py`).
#ifndef SWAPKIT_HIDDEN_OPERATORS_HPP
#define SWAPKIT_HIDDEN_OPERATORS_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyTypeObject hidden_type;

} // namespace swapkit

#endif
