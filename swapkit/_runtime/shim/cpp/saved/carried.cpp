// carried.cpp - captured groups that may still be saved.
#include "saved/carried.hpp"

#include <algorithm>
#include <utility>

namespace swapkit {

// Destroying a group may destroy others and call back here, so the list is swapped out first.

void Carried::add(std::vector<Ref<Group>> groups) {
    std::move(groups.begin(), groups.end(), std::back_inserter(groups_));
    if (groups_.size() >= next_sweep_) {
        sweep();
    }
}

bool Carried::sweep() {
    if (groups_.empty() || is_sweeping_) { // destroying groups may call back here
        return false;
    }
    is_sweeping_ = true;
    std::vector<Ref<Group>> former = std::exchange(groups_, {});
    for (Ref<Group> &group : former) {
        bool is_there =
            group->weak != nullptr && c10::raw::intrusive_ptr::use_count(group->weak) > 0;
        bool is_wanted = keeps_used_ || group->nhandles == 0;
        if (is_wanted && is_there && group->recipe != nullptr) {
            groups_.push_back(std::move(group));
        }
    }
    bool has_dropped = groups_.size() < former.size();
    former.clear();
    next_sweep_ = std::max(least_sweep, 2 * groups_.size());
    is_sweeping_ = false;
    return has_dropped;
}

void Carried::drop() {
    std::vector<Ref<Group>> dropped = std::exchange(groups_, {});
    next_sweep_ = least_sweep;
}

} // namespace swapkit
