// operator_clock.hpp - the clock of operators: runs the moves planned at an operator
// (`prefetch.hpp`).
#ifndef SWAPKIT_OPERATOR_CLOCK_HPP
#define SWAPKIT_OPERATOR_CLOCK_HPP

#include "python/python.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace swapkit {

// Where an alarm rings: in forward, or in backward, at whose first operator it always rings.
enum class Phase : std::uint8_t { forward, backward, backward_start };

constexpr std::int64_t never_forward = INT64_MAX, never_backward = -1;

// Start the clock, unless it runs. It runs until the process ends.
void clock_start();
// Return the number of the calling thread, whose operators are counted.
std::uint64_t clock_thread();
// Return the index of a thread's clock. Threads share clocks if there are more threads than clocks.
std::size_t clock_number(std::uint64_t thread);
// Ring at a thread's forward operators from a number up, and its backward operators from one down.
void clock_set(std::uint64_t thread, std::int64_t forward, std::int64_t backward);
// Return the operators' numbers of the latest backward pass, in the order in which they ran.
std::vector<std::int64_t> clock_record(std::uint64_t thread);
// Return how often the clock has rung, for tests.
std::uint64_t clock_rings();

// While one of these exists, this thread's operators are swapkit's own, and the clock does not
// ring: a move that it starts could move the storage in use.
class OwnOperators : Unmovable {
  public:
    OwnOperators();
    ~OwnOperators();
};

} // namespace swapkit

#endif
