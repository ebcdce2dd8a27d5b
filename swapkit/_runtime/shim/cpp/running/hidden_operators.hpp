// hidden_operators.hpp - operators that no mode, subclass or transform of the user's sees
// (`torch_compat/isolation.py`).
#ifndef SWAPKIT_HIDDEN_OPERATORS_HPP
#define SWAPKIT_HIDDEN_OPERATORS_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyTypeObject hidden_type;

} // namespace swapkit

#endif
