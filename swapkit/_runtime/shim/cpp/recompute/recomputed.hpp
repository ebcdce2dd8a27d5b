// recomputed.hpp - groups whose bytes are computed again, for those who need not know how
// (`recipes.hpp`), whose headers take long to compile.
//
// All of it needs the interpreter and the runtime's lock, where nothing else is said. Functions
// that may fail return bool with false, and an exception is set.
#ifndef SWAPKIT_RECOMPUTED_HPP
#define SWAPKIT_RECOMPUTED_HPP

#include "moves/mover.hpp"

#include <vector>

namespace swapkit {

// Whether a group's bytes are computed again where they are needed.
inline bool is_recomputed(const Group *group) {
    return group->recipe != nullptr && group->native == nullptr && group->standby != Standby::spare;
}

// Whether a user's region has made it: nobody else finds it.
inline bool is_of_region(const Group *group) {
    return group->standby == Standby::region || group->standby == Standby::held;
}

// Whether any mover has a group that a recipe makes.
bool is_any_recomputed();
// Give a group whose bytes are computed again its storage.
bool compute_again(Mover *mover, Group *group);
// Give up the storage of a group that has a recipe and no copy.
void forget_computed(Mover *mover, Group *group);
// Give up what a pass that retains its graph has computed again of a region.
void forget_retained(Mover *mover);
// The bytes at the begin of a group's storage that its operator writes: some, such as losses, leave
// others behind them as they were. 0: it leaves gaps, or there is no recipe.
std::size_t made_bytes(const Group *group);
// Let go of what nobody needs of that any more: its pass may have raised.
void sweep_retained(Mover *mover);
// Let a group that goes have no part in its recipe.
void recipe_leave(Group *group);

// Whether what is saved now may be had from a group's recipe: what a user has chosen is not, where
// an operand has changed and nobody saw it.
bool recipe_may_serve(const Group *group);

// Which recipes are settled: those of users' choices for operators, or all.
enum class Settled : std::uint8_t { chosen, all };

// Settle the recipes of what lies in some storages. `is_over`: it has changed already, so that
// nothing can be repeated from it.
bool settle(const std::vector<c10::StorageImpl *> &changed, bool is_over,
            Settled which = Settled::all);
// Whether there may be one to settle, of any storage, and of this one; on any thread, and without
// the interpreter.
bool may_settle_any();
bool may_settle(const c10::StorageImpl *changed);

} // namespace swapkit

#endif
