// assertions.hpp - what has to hold, checked in debug builds (SWAPKIT_DEBUG=1).
//
// As in the core: what a caller can get wrong is never asserted but raised.
#ifndef SWAPKIT_ASSERTIONS_HPP
#define SWAPKIT_ASSERTIONS_HPP

#ifdef SK_DEBUG
#define SWAPKIT_ASSERT(condition)                                                                  \
    ((condition) ? (void)0 : swapkit::assertion_failed(#condition, __FILE__, __LINE__))
#else
#define SWAPKIT_ASSERT(condition) ((void)0)
#endif

namespace swapkit {

// Say what does not hold, and end the process.
[[noreturn]] void assertion_failed(const char *condition, const char *file, int line);

} // namespace swapkit

#endif
