// resting.hpp - threads that *rest* from module hooks (`model/resting.py`): torch checks at every
// call of a module whether there are global hooks, and finds none on a thread that rests.
#ifndef SWAPKIT_RESTING_HPP
#define SWAPKIT_RESTING_HPP

#include "python/python.hpp"

namespace swapkit {

extern PyTypeObject rest_type;
// Torch's tables of global module hooks, with ours in them. A table is false for a thread that
// rests. Torch checks the last table only if the first one is false.
extern PyTypeObject first_table_type, last_table_type;

// prepare_rest(root), begin_rest(rest), end_rest(), interrupt_rests(), is_resting()
extern PyMethodDef rest_functions[];

} // namespace swapkit

#endif
