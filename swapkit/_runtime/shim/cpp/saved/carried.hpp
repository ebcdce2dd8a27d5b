// carried.hpp - groups that were captured and may be saved yet.
//
// Nobody else has them before autograd saves what they stand for, or another recipe needs it. Where
// that recipe may go while the result is still there to be saved, they are kept until that is gone.
#ifndef SWAPKIT_CARRIED_HPP
#define SWAPKIT_CARRIED_HPP

#include "saved/saved_tensors.hpp"

#include <cstddef>
#include <vector>

namespace swapkit {

// Needs the interpreter and the runtime's lock.
class Carried {
  public:
    explicit Carried(bool keeps_used = false) : keeps_used_(keeps_used) {}
    void add(std::vector<Ref<Group>> groups);
    // Let go of what is gone, or was saved, unless that is kept.
    void sweep();
    // Let go of all.
    void drop();
    bool is_empty() const { return groups_.empty(); }
    std::size_t count() const { return groups_.size(); }

  private:
    static constexpr std::size_t least_sweep = 16;
    std::vector<Ref<Group>> groups_;
    std::size_t next_sweep_ = least_sweep;
    bool is_sweeping_ = false;
    bool keeps_used_;
};

} // namespace swapkit

#endif
