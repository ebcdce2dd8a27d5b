// profiler_range.hpp - named ranges in torch's profiler.
//
// A range is a user scope, not an operator: the clock of operators, recorders and dispatch modes do
// not see it. Without a profiler, a range costs one call that reads a thread-local variable. This
// header needs none of ATen's.
#ifndef SWAPKIT_PROFILER_RANGE_HPP
#define SWAPKIT_PROFILER_RANGE_HPP

#include "python/python.hpp"

namespace swapkit {

// The names are those of the ranges in the profiler.
enum class RangeName : unsigned char {
    swap_out,     // a copy to the host or the disk is started, unless there is no room for it
    swap_in,      // a copy back is started
    swap_in_wait, // a thread waits for a copy back
};

// Begin a range on this thread; null: nobody listens. Torch calls its observers, under the locks
// that the caller holds; an observer must not call swapkit.
void *range_begin(RangeName name);
// End a range on the same thread.
void range_end(void *range);

// Any thread.
class ProfilerRange : Unmovable {
  public:
    explicit ProfilerRange(RangeName name) : range_(range_begin(name)) {}
    ~ProfilerRange() {
        if (range_ != nullptr) {
            range_end(range_);
        }
    }

  private:
    void *range_;
};

// Return the function's result; the call is a range of this name.
PyObject *in_range(const char *name, PyObject *function);

} // namespace swapkit

#endif
