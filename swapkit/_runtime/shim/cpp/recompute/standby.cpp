// standby.cpp - spare recipes, in case memory runs out.
#include "recompute/standby.hpp"

#include "moves/agenda.hpp"
#include "moves/prefetch.hpp"
#include "recompute/recipes.hpp"

#include <c10/core/GradMode.h>

#include <atomic>
#include <unordered_set>
#include <vector>

namespace swapkit {

namespace {

constexpr std::size_t little_bytes = std::size_t{1} << 16;

std::atomic<std::size_t> standing{0}; // number of hooks that stand by

// Whether an operand has its memory or can get it back. `next`: collects the recipe that must run
// before, if there is one.
bool is_there(const Operand &operand, std::vector<const Recipe *> *next) {
    const Handle *handle = handle_in(operand);
    if (handle == nullptr || !handle->is_stripped) {
        return handle == nullptr || has_memory(*handle->alias);
    }
    if (is_recomputed(handle->group)) {
        next->push_back(handle->group->recipe);
    }
    return true;
}

// Whether a recipe can run, with all recipes that it depends on. Code that manages storages itself
// (FSDP) may have freed an operand's memory.
bool can_compute(const Recipe *recipe) {
    std::unordered_set<const Recipe *> seen = {recipe};
    std::vector<const Recipe *> due = {recipe};
    while (!due.empty()) {
        const Recipe *next = due.back();
        due.pop_back();
        if (next->is_over) {
            return false;
        }
        std::vector<const Recipe *> needed;
        for (const Operand &operand : next->operands) {
            if (!is_there(operand, &needed)) {
                return false;
            }
        }
        for (const Recipe *each : needed) {
            if (seen.insert(each).second) {
                due.push_back(each);
            }
        }
    }
    return true;
}

} // namespace

bool stands_anyone_by() { return standing.load(std::memory_order_relaxed) != 0; }

void stand_by(Packer *packer, bool is_on) {
    SWAPKIT_ASSERT(has_python());
    if (is_on == (packer->stands_by != 0)) {
        return;
    }
    is_on ? standing++ : standing--;
    packer->stands_by = is_on ? 1 : 0;
    if (!is_on) {
        packer->mover->books->captured.drop();
    }
}

void end_captures(Mover *mover) {
    mover->books->captured.drop();
    mover->books->has_dropped = false;
}

Packer *standing_by() {
    if (!stands_anyone_by() || !c10::GradMode::is_enabled() || is_in_backward()) {
        return nullptr;
    }
    Packer *packer = innermost_packer();
    bool is_one = packer != nullptr && packer->stands_by != 0 && packer->is_inert == 0;
    return is_one ? packer : nullptr;
}

int may_keep(const Mover *mover, const c10::StorageImpl *storage) {
    if (storage->nbytes() <= little_bytes) {
        return 1;
    }
    return is_state(mover, storage);
}

void carry_captured(Mover *mover, std::vector<Ref<Group>> groups) {
    mover->books->captured.add(std::move(groups));
}

bool backward_begins(Mover *mover) {
    Carried &captured = mover->books->captured;
    if (captured.is_empty() || !is_in_backward()) {
        return true;
    }
    Locked lock(mover);
    if (lock) {
        captured.drop();
    }
    return static_cast<bool>(lock);
}

bool drop_spare(Mover *mover, Group *group, PyObject *digest) {
    bool is_held = group->standby == Standby::held;
    bool is_possible = (group->standby == Standby::spare || is_held) && group->recipe != nullptr &&
                       group->native == nullptr && group_is_exclusive(group) &&
                       can_compute(group->recipe);
    if (!is_possible) {
        return false;
    }
    Py_XDECREF(std::exchange(group->digest, Py_NewRef(digest)));
    group->standby = is_held ? Standby::region : Standby::captured;
    mover->books->has_dropped = mover->books->has_dropped || !is_held;
    timing_forget(group); // there is no copy to prefetch
    agenda_forget(mover, group);
    forget_computed(mover, group);
    return true;
}

} // namespace swapkit
