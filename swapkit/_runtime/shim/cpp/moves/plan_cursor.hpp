// plan_cursor.hpp - carrying a plan out: what is due at each event of a step.
//
// A plan says of every storage of a step whether it stays, moves, or is computed again, and at
// which operators it has to be gone and may come back. What the runtime sees of a step are its
// *events*, the calls of the session's two hooks; a recorded step says in which order they come. A
// *follower* counts them. While each is as it was recorded, that is a comparison, and what is due
// is done:
//
// - a storage that is to be swapped gets its departure and its arrival where it is saved first
//   (`agenda.hpp`): it is released at the event that is named, or when its copy is done if none is,
//   and comes back at the event that is named, as soon as there is room;
// - what is to be computed again has a recipe by then (`capturing.hpp`).
//
// The first event that is not as expected ends following until the next step begins: everything is
// as if there were no plan, and the owner decides what becomes of what is saved from then on.
//
// All of it needs the interpreter; groups are touched under the runtime's lock, which is taken here
// where it is not said otherwise. Functions that may fail return bool with false, or int with -1.
#ifndef SWAPKIT_PLAN_CURSOR_HPP
#define SWAPKIT_PLAN_CURSOR_HPP

#include "recompute/capturing.hpp"

namespace swapkit {

extern PyTypeObject follower_type;

// Whether a mover's follower has seen nothing unexpected in this step.
bool is_following(const Mover *mover);

// Something was saved; `packed` is what autograd keeps. 1: as expected; 0: the step is not followed
// any more, and nothing was done.
int follow_save(Mover *mover, PyObject *packed, bool is_new);
// Something is about to be used: check it, and give up what has to be gone by now.
bool follow_use(Mover *mover, PyObject *packed);
// It was used: bring back what is due. `has_waited`: for its copy.
bool follow_used(Mover *mover, bool has_waited);

// Let this thread capture what the plan computes again of what runs now, until its next event.
void follower_capture(Follower *follower);
// Whether a follower's step has had so many events, and captures by this table.
bool follower_is_at(const Follower *follower, const CaptureTable *table, std::uint64_t position);
// Keep what a row of a table has captured until it is saved, its storage is gone, or the step
// ends.
void follower_carry(Follower *follower, const CaptureTable *table, std::size_t row,
                    std::vector<Ref<Group>> groups);

// Let a group that goes have no place in the plan any more.
void follower_forget(Follower *follower, const Group *group);
// Note where a group is saved, if nobody hears of modules on this thread and the plan expects a
// save; false: one of these is not so. The event has not been counted yet.
bool follower_finds_site(const Follower *follower, Group *group);
// Let there be no plan until the next step. The lock is held.
void follower_end(Follower *follower);

} // namespace swapkit

#endif
