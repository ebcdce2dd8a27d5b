// operator_clock.hpp - the clock of operators: when what is planned at one is due (`prefetch.hpp`).
#ifndef SWAPKIT_OPERATOR_CLOCK_HPP
#define SWAPKIT_OPERATOR_CLOCK_HPP

#include "python/python.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace swapkit {

// Where an alarm rings: in forward, or in backward, whose first operator it always does.
enum class Phase : std::uint8_t { forward, backward, backward_start };

constexpr std::int64_t never_forward = INT64_MAX, never_backward = -1;

// Start the clock, unless it runs. It runs until the process ends.
void clock_start();
// The thread whose operators are counted where this is called.
std::uint64_t clock_thread();
// Which clock a thread has; more of them than there are clocks share one.
std::size_t clock_number(std::uint64_t thread);
// Ring at operators of a thread's forward from a number on, and of its backward from one down.
void clock_set(std::uint64_t thread, std::int64_t forward, std::int64_t backward);
// The numbers of the latest backward pass, in the order in which it ran them.
std::vector<std::int64_t> clock_record(std::uint64_t thread);
// How often it has rung, for tests.
std::uint64_t clock_rings();

// While there is one of these, this thread's operators are our own, and the clock does not ring:
// what it wakes might move the very storage at hand.
class OwnOperators {
  public:
    OwnOperators();
    ~OwnOperators();
    OwnOperators(const OwnOperators &) = delete;
    OwnOperators &operator=(const OwnOperators &) = delete;
};

} // namespace swapkit

#endif
