// late_modes.hpp - dispatch modes of ours that change no bits (`torch_compat/dispatch_modes.py`).
#ifndef SWAPKIT_LATE_MODES_HPP
#define SWAPKIT_LATE_MODES_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyMethodDef late_mode_functions[];

} // namespace swapkit

#endif
