// resting.hpp - threads that rest from hearing of modules (`model/resting.py`), as torch asks for
// them: at every call of a module, whether there are hooks for all.
#ifndef SWAPKIT_RESTING_HPP
#define SWAPKIT_RESTING_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyTypeObject rest_type;
// Torch's tables of hooks for all modules, with ours in them: they are false for a thread that
// rests. Torch looks into the last one only where the first was false.
extern PyTypeObject first_table_type, last_table_type;

// prepare_rest(root), begin_rest(rest), end_rest(), interrupt_rests(), is_resting()
extern PyMethodDef rest_functions[];

} // namespace swapkit

#endif
