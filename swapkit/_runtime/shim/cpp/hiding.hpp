// hiding.hpp - operators that no mode, subclass or transform of the user's sees
// (`torch_compat/isolation.py`).
#ifndef SWAPKIT_HIDING_HPP
#define SWAPKIT_HIDING_HPP

#include "python.hpp"

namespace swapkit {

extern PyTypeObject hidden_type;

} // namespace swapkit

#endif
