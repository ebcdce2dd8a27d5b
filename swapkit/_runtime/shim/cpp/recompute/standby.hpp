// standby.hpp - recipes for the case that memory runs out.
//
// While hooks *stand by*, every operator that can be repeated is captured, though no plan names it.
// What autograd saves of that keeps its storage; its recipe is *spare*: where neither the device
// nor the host has room, a rescue drops the storage, and backward computes it again. What autograd
// does not save has no storage in its group, as if a plan computed it again: other recipes may need
// it. Such recipes keep no memory alive that plain autograd would not.
//
// What is dropped leaves a digest of its bytes: what is computed again has to be the same. So a
// kernel that torch does not see, and that has written to an operand meanwhile, is noticed.
#ifndef SWAPKIT_STANDBY_HPP
#define SWAPKIT_STANDBY_HPP

#include "saved/pack_hooks.hpp"

#include <vector>

namespace swapkit {

// Whether any hooks stand by; on any thread, and without the interpreter.
bool stands_anyone_by();
// Let hooks stand by, or not any more: then what was captured and is not saved is forgotten. The
// lock is held, also here:
void stand_by(Packer *packer, bool is_on);
// A step has ended: likewise, and nothing that was dropped in it needs the operands of others.
void end_captures(Mover *mover);

// The hooks that what this thread's operator makes meets, if they stand by; borrowed. Null: none.
Packer *standing_by();
// Whether an operand's recipe may keep it, which no group does yet: little is. -1: an exception is
// set.
int may_keep(const Mover *mover, const c10::StorageImpl *storage);
// Let groups that were captured just now be found until a backward pass begins.
void carry_captured(Mover *mover, std::vector<Ref<Group>> groups);

// Forget what was captured and is not saved, where a backward pass begins. False: an exception is
// set.
bool backward_begins(Mover *mover);

// Give up the storage of a group whose recipe is spare. `digest`: of its bytes, for
// `compare_digest` of the links. False: it has none, others hold the storage, or an operand's
// memory was taken away.
bool drop_spare(Mover *mover, Group *group, PyObject *digest);

} // namespace swapkit

#endif
