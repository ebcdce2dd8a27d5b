// write_behind.hpp - copying groups out before memory runs out (*write-behind*).
//
// Groups saved under a budget wait in the order of saving. While the bytes in use exceed a
// watermark, the oldest groups are copied out but stay on the device, so a rescue finds storages
// that it can drop at once. `saved/eviction.py` sets the watermark, the number of copies at once
// and the bytes per step. Callers hold the runtime's lock and the GIL.
#ifndef SWAPKIT_WRITE_BEHIND_HPP
#define SWAPKIT_WRITE_BEHIND_HPP

#include "moves/mover.hpp"

namespace swapkit {

// Note that a group was saved under the budget, and run write-behind. `is_new`: this is the group's
// first save. False: an exception is set.
bool behind_saved(Mover *mover, Group *group, bool is_new);
// Copy some of the oldest groups out if memory use is above the watermark.
bool behind_copy(Mover *mover);
// Note which write-behind copies are done.
bool behind_settle(Mover *mover);
// Queue every group on the device that has no user's choice and no copy.
bool behind_resume(Mover *mover);

} // namespace swapkit

#endif
