// capturing.hpp - capturing operators that are recomputed, where they run.
//
// A *named* operator gets a kernel of ours at the dispatch key `BackendSelect`. This key is below
// autograd, autocast, function transforms and Python modes, and right above the backend. So the
// kernel sees the final operator with its final operands, and captures the result before autograd
// saves it. Other operators are not touched. A kernel stays until the process ends. Where nothing
// is captured, it only reads a few thread-local variables.
//
// A run is captured for the first of these that applies: the user's open region (`regions.hpp`),
// the user's choices for operators of the current module (`operator_choices.hpp`), a plan, or hooks
// that stand by (`standby.hpp`).
//
// For each event of a step, a plan lists the operator runs to capture between this event and the
// next. So each thread has a *cursor*: the runs to capture after its latest event.
//
// Operators that change tensors in place are named, too: recipes are settled before the change.
#ifndef SWAPKIT_CAPTURING_HPP
#define SWAPKIT_CAPTURING_HPP

#include "recompute/recomputed.hpp"

#include <memory>

namespace swapkit {

// The operator runs that are captured in a step.
struct CaptureTable;

// Read the rows that Python has built, sorted by event. Null: an exception is set.
std::shared_ptr<const CaptureTable> capture_table(const Bytes &rows, std::size_t events);

// Set this thread's cursor: what runs from now on comes after `position` events of a follower's
// step. Needs the GIL.
void capture_from(const Follower *follower, const std::shared_ptr<const CaptureTable> &table,
                  std::uint64_t position);

struct Named;

// Return the operator with this number. Null: there is none, and an exception is set.
const Named *named_at(std::size_t number);

// As `settle`, for code outside captured operators: what recomputes results now is not captured.
bool settle_uncaptured(std::vector<c10::StorageImpl *> changed, bool is_over, Settled which);

// Return the number of rows of a table.
std::size_t capture_count(const CaptureTable &table);

} // namespace swapkit

#endif
