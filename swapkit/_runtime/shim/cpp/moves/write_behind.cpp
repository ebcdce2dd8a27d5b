// write_behind.cpp - copying groups out before memory runs out.
#include "moves/write_behind.hpp"

#include <algorithm>
#include <utility>

namespace swapkit {

// Groups checked per save: a save must stay cheap when all of them are still held elsewhere.
static constexpr std::size_t looks_per_save = 8;

static constexpr Departure under_pressure = {.copy = CopyAt::pressure,
                                             .release = ReleaseAt::pressure};

// Get the bytes in use on the device. False: an exception is set.
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

// Move a group to the end of a line.
static void put_last(Mover *mover, Group *group, Line line) {
    agenda_remain(mover, group);
    agenda_move(mover->books->agenda, group, line);
}

bool behind_settle(Mover *mover) {
    const BySerial &copying = mover->books->agenda.line(Line::copying);
    while (!copying.empty()) {
        auto group = Ref<Group>::share(copying.begin()->second);
        int is_done = poll_out(mover, group.get());
        if (is_done != 1) {
            return is_done == 0;
        }
        agenda_remain(mover, group.get());
    }
    return true;
}

// Start copying the oldest waiting group, if it is still resident and could be dropped afterwards.
static bool copy_oldest(Mover *mover) {
    auto group = Ref<Group>::share(mover->books->agenda.line(Line::ahead).begin()->second);
    agenda_remain(mover, group.get());
    if (group_state(group.get()) != SK_GROUP_RESIDENT) {
        return true;
    }
    if (!group_is_exclusive(group.get())) {
        put_last(mover, group.get(), Line::ahead); // the forward pass still uses it
        return true;
    }
    bool is_reclaimable = mover->makes_reclaimable != 0;
    int started =
        is_reclaimable ? make_reclaimable(mover, group.get()) : copy_out(mover, group.get());
    if (started == 1) {
        put_last(mover, group.get(), Line::copying);
    }
    if (started == 1 && !is_reclaimable && mover->ahead_bytes != no_limit) {
        mover->ahead_bytes -= std::min<unsigned long long>(mover->ahead_bytes, group->nbytes);
    }
    return started >= 0;
}

bool behind_copy(Mover *mover) {
    const Agenda &agenda = mover->books->agenda;
    const BySerial &ahead = agenda.line(Line::ahead), &copying = agenda.line(Line::copying);
    if (mover->holds_copies != 0 || mover->host_is_full != 0 || ahead.empty() ||
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
    std::size_t count = std::min(looks_per_save, ahead.size());
    for (std::size_t i = 0; i < count; i++) {
        if (!behind_settle(mover)) {
            return false;
        }
        if (copying.size() >= mover->most_copying || mover->host_is_full != 0 || ahead.empty()) {
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
        if (!agenda_depart(mover, group, under_pressure)) {
            return false;
        }
        if (mover->hears_saves != 0 &&
            !call_method<"note_automatic">(mover->policy, as_object(group))) {
            return false;
        }
    }
    return behind_copy(mover);
}

bool behind_resume(Mover *mover) {
    Books &books = *mover->books;
    const BySerial &ahead = books.agenda.line(Line::ahead);
    while (!ahead.empty()) {
        agenda_remain(mover, ahead.begin()->second);
    }
    for (auto [serial, group] : books.resident) {
        bool is_idle = group->line == Line::none && group_state(group) == SK_GROUP_RESIDENT;
        if (is_idle && group->terms.action == Action::automatic &&
            !agenda_depart(mover, group, under_pressure)) {
            return false;
        }
    }
    return true;
}

} // namespace swapkit
