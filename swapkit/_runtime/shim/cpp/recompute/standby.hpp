// standby.hpp - spare recipes, in case memory runs out.
//
// While hooks *stand by*, every repeatable operator is captured, without a plan. Saved results keep
// their storage, and their recipe is *spare*: if neither the device nor the host has room, a rescue
// drops the storage, and backward recomputes it. The group of a result that is not saved has no
// storage, as if planned for recomputation: other recipes may need it. Spare recipes keep no memory
// alive that plain autograd would free.
//
// A rescue that drops a storage keeps a digest of the bytes, and the recomputed bytes must match
// it. This detects kernels that write to an operand without torch seeing it.
#ifndef SWAPKIT_STANDBY_HPP
#define SWAPKIT_STANDBY_HPP

#include "saved/pack_hooks.hpp"

#include <vector>

namespace swapkit {

// Return whether any hooks stand by, on any thread. Does not need the GIL.
bool stands_anyone_by();
// Start or stop standing by. Stopping drops captured groups that were not saved. The lock is held,
// as in `end_captures`.
void stand_by(Packer *packer, bool is_on);
// End a step: drop captured groups that were not saved. Groups that a rescue has dropped in this
// step need no recipes of others any more.
void end_captures(Mover *mover);

// The hooks that see the results of this thread's operator, if they stand by, borrowed; else null.
Packer *standing_by();
// Return whether a recipe may keep an operand that has no group: small tensors and the model's
// state. -1: an exception is set.
int may_keep(const Mover *mover, const c10::StorageImpl *storage);
// Keep newly captured groups findable until a backward pass begins.
void carry_captured(Mover *mover, std::vector<Ref<Group>> groups);

// If a backward pass begins, drop captured groups that were not saved. False: an exception is set.
bool backward_begins(Mover *mover);

// Drop the storage of a group with a spare recipe. `digest`: of its bytes, for `compare_digest` of
// the links. False: it has no spare recipe, others hold the storage, or an operand has no memory.
bool drop_spare(Mover *mover, Group *group, PyObject *digest);

} // namespace swapkit

#endif
