// prefetch.hpp - evicting and prefetching at operators: scopes with `prefetch=n`.
//
// With a distance of n operators, a saved tensor is released 3n operators after it was saved. The
// release waits for the copy, and is delayed while something besides the graph holds the storage.
// The copy back starts n operators before the first use in backward. An operator is an autograd
// node; its number rises in forward and falls in backward (`operator_clock.hpp`). Not every forward
// node runs in backward, so the node n before a use is learned from the previous pass with the same
// start. Until there is such a pass, the distance is counted in node numbers.
//
// Source: MindFormers, fine-grained activation swap: `backward_prefetch`.
#ifndef SWAPKIT_PREFETCH_HPP
#define SWAPKIT_PREFETCH_HPP

#include "moves/mover.hpp"
#include "running/operator_clock.hpp"

namespace swapkit {

// The operators at which a mover acts. Guarded by the runtime's lock and the GIL.
struct Timing;

// Set when a group leaves and comes back; an operator has just saved it. The lock is held.
bool timing_saved(Mover *mover, Group *group, Departure *departure, Arrival *arrival);
// Add a move that was due on a thread's clock to the trace, if there is one.
bool timing_note(const Mover *mover, std::uint64_t clock, PyObject *kind, Group *group,
                 std::int64_t number);
// Forget a group that is being destroyed.
void timing_forget(Group *group);
// Remove the alarms of a mover that is being destroyed.
void timing_end(Mover *mover);
// Do the moves due at an operator, for every mover. Takes the lock. False: an exception is set.
bool timing_ring(std::uint64_t thread, std::int64_t number, Phase phase);
// Return, for tests, the numbers of saves, pending releases and orders of each thread.
Ref<> timing_counts(const Mover *mover);

} // namespace swapkit

#endif
