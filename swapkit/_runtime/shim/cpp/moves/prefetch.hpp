// prefetch.hpp - when planned swaps are released and come back: at operators that the scope names.
//
// With a distance of n operators, the memory of a saved tensor is released 3n operators after it
// was saved, waiting for its copy if need be, or later if others than the graph still have it then;
// and the copy back starts n operators before the first use in backward. An operator is an autograd
// node; its number rises in forward and falls in backward (`operator_clock.hpp`). Not every node of
// forward runs in backward, so which ones are n before a use is learned: from the pass before that
// started alike, and counted by numbers until there was one.
//
// Source: MindFormers, fine-grained activation swap: `backward_prefetch`.
#ifndef SWAPKIT_PREFETCH_HPP
#define SWAPKIT_PREFETCH_HPP

#include "moves/mover.hpp"
#include "running/operator_clock.hpp"

namespace swapkit {

// Of a mover, when operators wake it; guarded by the runtime's lock and the interpreter.
struct Timing;

// An operator has just saved a group: say when it leaves, and how it comes back. The lock is held.
bool timing_saved(Mover *mover, Group *group, Departure *departure, Arrival *arrival);
// Tell who traces planned moves of one that was due on a thread's clock.
bool timing_note(const Mover *mover, std::uint64_t clock, PyObject *kind, Group *group,
                 std::int64_t number);
// A group goes.
void timing_forget(Group *group);
// A mover goes, and its alarms with it.
void timing_end(Mover *mover);
// Do what is due at an operator, for every mover. Takes the lock; false: an exception is set.
bool timing_ring(std::uint64_t thread, std::int64_t number, Phase phase);
// What is remembered, for tests: of each thread how many saves, releases to come and orders.
PyObject *timing_counts(const Mover *mover);

} // namespace swapkit

#endif
