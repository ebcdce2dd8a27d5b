// carried.hpp - captured groups that may still be saved.
//
// Nothing else holds these groups until autograd saves their tensors or another recipe needs them.
// If that recipe may be freed while the result can still be saved, saved groups are kept until the
// result is gone (`keeps_used`).
#ifndef SWAPKIT_CARRIED_HPP
#define SWAPKIT_CARRIED_HPP

#include "saved/saved_tensors.hpp"

#include <cstddef>
#include <vector>

namespace swapkit {

// Needs the GIL and the runtime's lock.
class Carried {
  public:
    explicit Carried(bool keeps_used = false) : keeps_used_(keeps_used) {}
    void add(std::vector<Ref<Group>> groups);
    // Drop groups whose storage or recipe is gone, and saved groups unless `keeps_used`. Return
    // whether there was one.
    bool sweep();
    // Drop all groups.
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
