// assertions.hpp - invariants, checked in debug builds (SWAPKIT_DEBUG=1).
//
// As in the core, a caller's mistake is never asserted: it raises.
#ifndef SWAPKIT_ASSERTIONS_HPP
#define SWAPKIT_ASSERTIONS_HPP

#ifdef SK_DEBUG
#define SWAPKIT_ASSERT(condition)                                                                  \
    ((condition) ? (void)0 : swapkit::assertion_failed(#condition, __FILE__, __LINE__))
#else
#define SWAPKIT_ASSERT(condition) ((void)0)
#endif

namespace swapkit {

// Print the condition that failed, and abort the process.
[[noreturn]] void assertion_failed(const char *condition, const char *file, int line);

} // namespace swapkit

#endif
