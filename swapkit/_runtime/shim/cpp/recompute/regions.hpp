// regions.hpp - users' regions, which are recomputed in backward.
//
// While a *region* is open on a thread, all its repeatable operators are captured, except those
// whose results the user keeps. If autograd saves a captured result, the region's hooks keep no
// storage. Other saved tensors go where they would go without the region if they are inputs of the
// region; otherwise they are kept. Only the region finds the results made in it or in an enclosing
// region, by storage and version. When it ends, its results escape unchanged: later changes to them
// do not affect what the region recomputes.
//
// Results of an inner region also belong to the outer region if that needs them. A recomputation
// may need results of a region that is neither its own nor an enclosing one. These are released
// again right afterwards; they are recomputed when their own region needs them.
//
// A region that *holds* keeps its results until its end, and only then is it decided whether to
// release them. Meanwhile a rescue may move them.
//
// Sessions and recorders need the same events in each step. So tensors from outside that a region
// saves, and all operands, go through the hooks that count events, and these hooks are notified of
// each use in backward (`Handle::teller`). What the region recomputes is no event. A rescue may
// move recomputed results while they exist, but they are recomputed at the same points as without.
#ifndef SWAPKIT_REGIONS_HPP
#define SWAPKIT_REGIONS_HPP

#include "recompute/recipes.hpp"
#include "recompute/refills.hpp"
#include "saved/pack_hooks.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace swapkit {

struct Region;

// The innermost open region of this thread, borrowed; null: there is none. Does not need the GIL.
Region *open_region();
// Return whether a region keeps the results of an operator.
bool region_keeps(const Region *region, const Named *named);
// Note the results of such an operator. Needs the GIL.
void region_note_kept(Region *region, const std::vector<at::Tensor> &made);

// Return whether tensors from outside that a region saves are events of a session or a recorder.
bool region_tells(const Region *region);
// The hooks for what a region keeps; borrowed.
Packer *region_kept(const Region *region);
std::shared_ptr<Run> region_run(const Region *region);

// Return whether an operator that is about to run refills memory (`refills.hpp`).
bool region_refills(Region *region, const Named *named, const Stack &stack);
// Return the storages that an operator is about to write to, if a region has refilled any;
std::vector<c10::StorageImpl *> region_writes(const Region *region, const Named *named,
                                              const Stack &stack);
// note that it has written to them, and that this write was not captured.
void region_written(Region *region, const std::vector<c10::StorageImpl *> &changed);

// The functions below need the GIL and the runtime's lock.

// Let a region find captured groups: of these results.
void region_carry(Region *region, const std::vector<at::Tensor> &made,
                  std::vector<Ref<Group>> groups);
// Find a group made in a region, or in an enclosing one, that this region needs now; null: none.
Group *region_find(Region *region, Key key);
// Find the refill, in a region or an enclosing one, that a tensor now has the bytes of; null: none.
Refill *region_refilled(Region *region, c10::TensorImpl *tensor, Span span);
// Pack an operand that no region has made. None: an exception is set.
Ref<> region_operand(Region *region, c10::TensorImpl *impl, Key key, Span span);

} // namespace swapkit

#endif
