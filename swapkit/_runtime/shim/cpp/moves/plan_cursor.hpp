// plan_cursor.hpp - carrying out a plan, event by event.
//
// A plan says for every storage of a step whether it stays, moves, or is recomputed. For those that
// move it also says by which operator they must be gone and from which one on they may come back.
// The runtime sees a step as *events*: the calls of the session's two hooks. A recorded step gives
// their order. A *follower* counts the events and compares each with the recorded one. While they
// match, it does what is due:
//
// - At its first save, a storage to be swapped gets its departure and arrival (`agenda.hpp`). It is
//   released at the event that the plan names, or, if there is none, when its copy is done. It
//   comes back at the event that the plan names, as soon as there is room.
// - A storage to be recomputed already has a recipe at that point (`capturing.hpp`).
//
// The first unexpected event ends following until the next step begins. From then on everything
// runs as without a plan, and the owner decides about new saved tensors.
//
// All functions need the GIL. Groups are guarded by the runtime's lock, which the functions take
// themselves unless noted. Functions that may fail return false (bool) or -1 (int).
#ifndef SWAPKIT_PLAN_CURSOR_HPP
#define SWAPKIT_PLAN_CURSOR_HPP

#include "recompute/capturing.hpp"

namespace swapkit {

extern Type follower_type;

// Return whether a mover's follower has seen nothing unexpected in this step.
bool is_following(const Mover *mover);

// Handle a save; `packed` is the object that autograd keeps. 1: as expected; 0: the step is not
// followed any more, and nothing was done.
int follow_save(Mover *mover, PyObject *packed, bool is_new);
// Handle the start of a use: check the event, and release the groups that are due.
bool follow_use(Mover *mover, PyObject *packed);
// Handle the end of a use: start the prefetches that are due. `has_waited`: the use waited for its
// copy.
bool follow_used(Mover *mover, bool has_waited);

// Capture on this thread, until its next event, the operators that the plan recomputes.
void follower_capture(Follower *follower);
// Return whether a follower's step has had `position` events and captures by this table.
bool follower_is_at(const Follower *follower, const CaptureTable *table, std::uint64_t position);
// Keep the groups that a row of a table has captured until they are saved, their storages are gone,
// or the step ends.
void follower_carry(Follower *follower, const CaptureTable *table, std::size_t row,
                    std::vector<Ref<Group>> groups);

// Remove a group that is being destroyed from the plan.
void follower_forget(Follower *follower, const Group *group);
// If modules are not tracked on this thread and the plan expects a first save now, set the group's
// site and return true. The event has not been counted yet.
bool follower_finds_site(const Follower *follower, Group *group);
// Stop following until the next step. The lock is held.
void follower_end(Follower *follower);

} // namespace swapkit

#endif
