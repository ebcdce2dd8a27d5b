// capturing.hpp - operators that are computed again, captured where they run.
//
// Operators that somebody names have a kernel of ours at the dispatcher's key `BackendSelect`. That
// lies below autograd, autocast, function transforms and Python's modes, and right above the
// backend: the kernel sees what runs in the end, with the operands that it gets, and captures the
// result before autograd saves it. Other operators are not touched. A kernel stays for as long as
// the process; where nothing is captured it costs a look at a few variables of the thread.
//
// Who wants a run captured is, in this order: the user's region that is open (`regions.hpp`); the
// user's choices for operators of the module that runs (`operator_choices.hpp`); a plan; hooks that
// stand by
// (`standby.hpp`).
//
// A plan says of each event of a step which runs of which operators after it, and before the next,
// are captured. So a thread has a *cursor*: what is wanted after its latest event.
//
// Operators that change tensors in place are named, too: recipes are settled before.
#ifndef SWAPKIT_CAPTURING_HPP
#define SWAPKIT_CAPTURING_HPP

#include "recompute/recomputed.hpp"

#include <memory>

namespace swapkit {

// What is captured in a step.
struct CaptureTable;

// Read the rows that Python has made; they are in order of their events. Null: an exception is set.
std::shared_ptr<const CaptureTable> capture_table(const Py_buffer &rows, std::size_t events);

// What this thread runs from now on comes after so many events of a follower's step. Needs the
// interpreter.
void capture_from(const Follower *follower, const std::shared_ptr<const CaptureTable> &table,
                  std::uint64_t position);

struct Named;

// The operator of a number. Null: there is none, and an exception is set.
const Named *named_at(std::size_t number);

// How many rows a table has.
std::size_t capture_count(const CaptureTable &table);

extern PyMethodDef capture_functions[];

} // namespace swapkit

#endif
