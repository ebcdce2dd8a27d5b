// behind.cpp - copying ahead while memory fills up.
#include "behind.hpp"

#include <algorithm>
#include <utility>

namespace swapkit {

// Groups looked at per save, so that one stays cheap when all of them are still held elsewhere.
static constexpr std::size_t looks_per_save = 8;

static void put(BySerial &groups, Mover *mover, Group *group) {
    group->behind = ++mover->books->behind_turns;
    groups[group->behind] = group;
}

void behind_forget(Mover *mover, Group *group) {
    std::uint64_t turn = std::exchange(group->behind, 0);
    if (turn != 0) {
        mover->books->dirty.erase(turn);
        mover->books->copying.erase(turn);
    }
}

// What is in use on the device; false: an exception is set.
static bool find_in_use(const Mover *mover, std::uint64_t *nbytes_out) {
    if (mover->pool != 0) {
        sk_pool_stats stats;
        links.sk_pool_stats_get(reinterpret_cast<sk_pool *>(mover->pool), &stats);
        *nbytes_out = stats.allocated_bytes[0].current;
        return true;
    }
    Ref<> found = call_method<"in_use_bytes">(mover->policy);
    *nbytes_out = found ? PyLong_AsUnsignedLongLong(found.get()) : 0;
    return PyErr_Occurred() == nullptr;
}

bool behind_settle(Mover *mover) {
    BySerial &copying = mover->books->copying;
    while (!copying.empty()) {
        auto group = Ref<Group>::share(copying.begin()->second);
        int is_done = poll_out(mover, group.get());
        if (is_done != 1) {
            return is_done == 0;
        }
        behind_forget(mover, group.get());
    }
    return true;
}

// Start copying the oldest that waits, if it still is of use and can be dropped afterwards.
static bool copy_oldest(Mover *mover) {
    Books &books = *mover->books;
    auto group = Ref<Group>::share(books.dirty.begin()->second);
    behind_forget(mover, group.get());
    if (group_state(group.get()) != SK_GROUP_RESIDENT) {
        return true;
    }
    if (!group_is_exclusive(group.get())) {
        put(books.dirty, mover, group.get()); // the forward pass still uses it
        return true;
    }
    bool is_aside = mover->sets_aside != 0;
    int started = is_aside ? set_aside(mover, group.get()) : copy_out(mover, group.get());
    if (started == 1) {
        put(books.copying, mover, group.get());
    }
    if (started == 1 && !is_aside && mover->ahead_bytes != no_limit) {
        mover->ahead_bytes -= std::min<unsigned long long>(mover->ahead_bytes, group->nbytes);
    }
    return started >= 0;
}

bool behind_copy(Mover *mover) {
    Books &books = *mover->books;
    if (mover->holds_copies != 0 || mover->host_is_full != 0 || books.dirty.empty() ||
        mover->ahead_bytes == 0 || mover->watermark_bytes == no_limit) {
        return true;
    }
    std::uint64_t in_use_bytes = 0;
    if (!find_in_use(mover, &in_use_bytes)) {
        return false;
    }
    if (in_use_bytes < mover->watermark_bytes) {
        return true;
    }
    std::size_t count = std::min(looks_per_save, books.dirty.size());
    for (std::size_t i = 0; i < count; i++) {
        if (!behind_settle(mover)) {
            return false;
        }
        if (books.copying.size() >= mover->most_copying || mover->host_is_full != 0 ||
            books.dirty.empty()) {
            return true;
        }
        if (!copy_oldest(mover)) {
            return false;
        }
    }
    return true;
}

bool behind_saved(Mover *mover, Group *group, bool is_new) {
    if (is_new) {
        behind_forget(mover, group); // it was captured before, and waits already
        put(mover->books->dirty, mover, group);
        if (mover->hears_saves != 0 &&
            !call_method<"note_automatic">(mover->policy, as_object(group))) {
            return false;
        }
    }
    return behind_copy(mover);
}

void behind_resume(Mover *mover) {
    Books &books = *mover->books;
    while (!books.dirty.empty()) {
        behind_forget(mover, books.dirty.begin()->second);
    }
    for (auto [serial, group] : books.resident) {
        bool is_idle = group->behind == 0 && group_state(group) == SK_GROUP_RESIDENT;
        if (is_idle && group->terms.action == Action::automatic) {
            put(books.dirty, mover, group);
        }
    }
}

} // namespace swapkit
