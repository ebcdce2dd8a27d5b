// hook_bypass.hpp - threads that *bypass* module hooks (`model/hook_bypass.py`): torch checks at
// every call of a module whether there are global hooks, and finds none on a thread that bypasses
// them.
#ifndef SWAPKIT_HOOK_BYPASS_HPP
#define SWAPKIT_HOOK_BYPASS_HPP

#include "python/python.hpp"

namespace swapkit {

// FirstTable, LastTable: torch's tables of global module hooks, with ours in them. A table is false
// for a thread that bypasses them. Torch checks the last table only if the first one is false.
//
// Take `__bool__` off both types, once they are ready. Python's own check needs only their slot.
// Torch's compiler since 2.14 leaves the graph at a `__bool__` in C; without one it takes the
// length, which is what threads see that do not bypass. False: an exception is set.
bool hide_table_checks();

} // namespace swapkit

#endif
