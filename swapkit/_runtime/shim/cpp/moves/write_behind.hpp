// write_behind.hpp - copying ahead while memory fills up (*write-behind*).
//
// What is saved under a budget waits in the order of saving. While more is in use than a watermark,
// the oldest are copied out and stay on the device: a rescue then finds storages to drop at once.
// `saved/eviction.py` says from which watermark on, how many copies may be under way, and how many
// bytes are worth it in a step. The runtime's lock is held, and the interpreter, in all that is
// here.
#ifndef SWAPKIT_WRITE_BEHIND_HPP
#define SWAPKIT_WRITE_BEHIND_HPP

#include "moves/mover.hpp"

namespace swapkit {

// Note that something was saved under the budget, and copy ahead. `is_new`: nothing was saved of
// the group before. False: an exception is set.
bool behind_saved(Mover *mover, Group *group, bool is_new);
// Copy ahead if memory fills up.
bool behind_copy(Mover *mover);
// Note which of these copies are done.
bool behind_settle(Mover *mover);
// Let every group that is on the device, and that nobody has chosen for, wait to be copied.
bool behind_resume(Mover *mover);

} // namespace swapkit

#endif
