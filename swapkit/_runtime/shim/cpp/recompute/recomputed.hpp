// recomputed.hpp - groups whose bytes are recomputed, for code that does not need recipes.
//
// `recipes.hpp` has the rest; its headers take long to compile. All functions need the GIL and the
// runtime's lock unless noted. Functions that may fail set an exception and return false.
#ifndef SWAPKIT_RECOMPUTED_HPP
#define SWAPKIT_RECOMPUTED_HPP

#include "moves/mover.hpp"

#include <vector>

namespace swapkit {

// While one of these lives, this thread's operators are parts of another operator, or our own:
// nothing is captured.
class Deeper : Unmovable {
  public:
    Deeper() { depth()++; }
    ~Deeper() { depth()--; }
    static int &depth();
};

// Return whether a group's bytes are recomputed when they are needed.
inline bool is_recomputed(const Group *group) {
    return group->recipe != nullptr && group->native == nullptr && group->standby != Standby::spare;
}

// Return whether a group belongs to a user's region. Only the region can find it.
inline bool is_of_region(const Group *group) {
    return group->standby == Standby::region || group->standby == Standby::held;
}

// Return whether any mover has a group with a recipe.
bool is_any_recomputed();
// Recompute the storage of a group.
bool compute_again(Mover *mover, Group *group);
// Release the storage of a group that has a recipe. A region's group also loses its copy.
void forget_computed(Mover *mover, Group *group);
// Release what a backward pass that retains its graph has recomputed.
void forget_retained(Mover *mover);
// The number of bytes at the start of a group's storage that its operator writes. Some operators,
// such as losses, leave later bytes unwritten. 0: the result has gaps, or there is no recipe.
std::size_t made_bytes(const Group *group);
// Forget those of these groups that have no handles left: their pass may have raised.
void sweep_retained(Mover *mover);
// Detach a group from its recipe, if it has one.
void recipe_leave(Group *group);

// Return whether a recipe may serve a tensor that is saved now. A recipe of a user's choice for an
// operator may not if an operand has changed unseen.
bool recipe_may_serve(const Group *group);

// Which recipes to settle: those of users' choices for operators, or all.
enum class Settled : std::uint8_t { chosen, all };

// Settle the recipes that read or make some storages. `is_over`: the storages have changed already,
// so the recipes cannot run any more.
bool settle(const std::vector<c10::StorageImpl *> &changed, bool is_over,
            Settled which = Settled::all);
// Return whether there may be recipes to settle, of any storage or of this one. On any thread,
// without the GIL.
bool may_settle_any();
bool may_settle(const c10::StorageImpl *changed);

} // namespace swapkit

#endif
