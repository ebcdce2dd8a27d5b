// regions.hpp - a user's regions: what their operators make is computed again in backward.
//
// While a *region* is open on a thread, every operator there that can be repeated is captured, but
// for those whose results the user keeps. What autograd saves of that meets the region's hooks,
// which keep no storage; what else is saved goes where it would go without the region, if the
// region was handed it, and is kept if not. A region finds what was made in it, or in one around
// it, by storage and version; nobody else does. When it ends, what it has made escapes as it is:
// whoever changes that later changes nothing of what the region computes again.
//
// What is made in a region inside is of the one around, too, if that needs it. Where something is
// computed again, what is of neither its region nor one around that is given up once more behind
// it: it is needed when its own region is.
//
// A region that *holds* gives nothing up before its end, where it is said whether it may. What it
// holds a rescue may move meanwhile.
//
// In a session's step, or one that is recorded, events are the same each time: what a region saves
// of others', and each operand, meets the hooks that count them, and these are told of its use in
// backward (`Handle::teller`). What the region computes again is no event. A rescue may move it
// while it is there, but it is computed once more where it would be without one.
#ifndef SWAPKIT_REGIONS_HPP
#define SWAPKIT_REGIONS_HPP

#include "recompute/recipes.hpp"
#include "saved/pack_hooks.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace swapkit {

struct Region;

extern PyTypeObject region_type;

// The region that this thread's operators run in, borrowed; null: they run in none. Without the
// interpreter.
Region *open_region();
// Whether a region keeps what an operator makes.
bool region_keeps(const Region *region, const Named *named);
// Note what such an operator has made. Needs the interpreter.
void region_note_kept(Region *region, const std::vector<at::Tensor> &made);

// Whether what a region saves of others' is an event of a session, or of a recorder.
bool region_tells(const Region *region);
// The hooks that stand for what is kept in a region; borrowed.
Packer *region_rest(const Region *region);
std::shared_ptr<Run> region_run(const Region *region);

// All of these need the interpreter and the runtime's lock.

// Let a region find what was captured.
void region_carry(Region *region, std::vector<Ref<Group>> groups);
// What was made in a region, or in one around it, and is needed there now; null: nothing.
Group *region_find(Region *region, Key key);
// What stands for an operand that no region has made. None: an exception is set.
Ref<> region_operand(Region *region, c10::TensorImpl *impl, Key key, Span span);

} // namespace swapkit

#endif
