// agenda.cpp - the lists of groups that leave and that come back.
#include "moves/agenda.hpp"

#include "memory/streams.hpp"
#include "moves/mover.hpp"
#include "moves/prefetch.hpp"
#include "recompute/recomputed.hpp"

#include <algorithm>

namespace swapkit {

namespace {

// Prefetch `ahead_groups` groups, or up to `ahead_most` while their sum is below `ahead_bytes`.
constexpr std::size_t ahead_groups = 2;
constexpr std::size_t ahead_most = 16;
constexpr std::size_t ahead_bytes = std::size_t{64} << 20;

// On a device with streams the host runs far ahead of the copies. Releasing groups only when their
// copies are done would keep all saved tensors alive. With more than this on its way out, the
// stream waits for the oldest copy instead. Later copies then wait with the stream, so enough
// copies must already be queued: 10 ms on a 50 GB/s link.
constexpr std::size_t stash_groups = 64;
constexpr std::size_t stash_least_groups = 2;
constexpr std::size_t stash_bytes = std::size_t{512} << 20;

// Number of waiting groups that each save checks.
constexpr std::size_t looks = 64;

// ---- lists --------------------------------------------------------------------------------------

void leave_line(Agenda &agenda, Group *group) {
    if (group->line == Line::none) {
        return;
    }
    agenda.line(group->line).erase(group->turn);
    agenda.stash_bytes -= std::exchange(group->stash_bytes, 0);
    group->line = Line::none;
    group->turn = 0;
}

void drop_end(Agenda &agenda, Group *group) {
    if (std::exchange(group->departure.has_end, false)) {
        const Point &end = group->departure.end;
        agenda.schedule(end.clock).ends.erase({end.number, end.order});
    }
}

void drop_arrival(Agenda &agenda, Group *group) {
    if (group->arrival.when == ComeAt::point) {
        const Point &at = group->arrival.at;
        agenda.schedule(at.clock).arrivals.erase({at.number, at.order});
        group->arrival.when = ComeAt::use;
    }
}

bool is_planned(const Group *group) {
    return group->arrival.when != ComeAt::room && group->arrival.at.clock == plan_clock;
}

// Cancel a group's departure and arrival.
void stay(Mover *mover, Group *group) {
    agenda_remain(mover, group);
    drop_arrival(mover->books->agenda, group);
    group->departure.copy = CopyAt::never;
}

// For assertions: whether the lists agree with the groups.
[[maybe_unused]] bool is_sound(const Agenda &agenda) {
    std::size_t on_stash = 0, coming = 0, lost = 0;
    for (std::size_t which = 0; which < line_count; which++) {
        for (auto [turn, group] : agenda.lines[which]) {
            lost += group->turn == turn && group->line == static_cast<Line>(which) ? 0 : 1;
            on_stash += group->stash_bytes;
        }
    }
    for (const Coming &each : agenda.coming) {
        coming += each.nbytes;
    }
    return lost == 0 && on_stash == agenda.stash_bytes && coming == agenda.coming_bytes;
}

// ---- leaving ------------------------------------------------------------------------------------

// Whether the plan expects no further save of a group.
bool is_settled(const Agenda &agenda, const Group *group) {
    return group->departure.last_save < agenda.events;
}

// Whether the copy of a waiting group can start.
bool may_start(const Agenda &agenda, const Group *group) {
    const bool is_partial = group_is_partial(group);
    if (group->departure.copy == CopyAt::once) {
        return !is_partial || is_settled(agenda, group);
    }
    // Other holders of the storage may still write to it: to pieces with their own versions, or in
    // the operator that saved it. A partial group waits for the next save, which may be of the same
    // storage.
    const bool is_newest = group->turn == agenda.newest_turn;
    return group_is_exclusive(group) && !(is_newest && is_partial);
}

// Start the copy of a waiting group.
bool start(Mover *mover, Group *group) {
    Agenda &agenda = mover->books->agenda;
    int started = group_state(group) == SK_GROUP_RESIDENT ? copy_out(mover, group) : 1;
    if (started < 0 || group->line != Line::starts) {
        return started >= 0;
    }
    if (started == 0) {
        leave_line(agenda, group); // no room: it stays until the end of its departure
        return true;
    }
    const Departure &departure = group->departure;
    agenda_move(agenda, group, departure.release == ReleaseAt::copied ? Line::leaves : Line::bound);
    if (departure.copy == CopyAt::exclusive && departure.release == ReleaseAt::copied) {
        group->stash_bytes = group->nbytes;
        agenda.stash_bytes += group->nbytes;
    }
    return true;
}

// The next group of a line behind a turn, which becomes its own. None: there is none. Groups may
// join and leave the line between two calls.
Ref<Group> next_on(const Mover *mover, Line line, std::uint64_t *turn) {
    const BySerial &all = mover->books->agenda.line(line);
    auto next = all.upper_bound(*turn);
    if (next == all.end()) {
        return {};
    }
    *turn = next->first;
    return Ref<Group>::share(next->second);
}

// Start the copies of all groups that scopes have sent.
bool start_all(Mover *mover) {
    std::uint64_t turn = 0;
    while (Ref<Group> group = next_on(mover, Line::starts, &turn)) {
        if (group->departure.copy == CopyAt::exclusive && !start(mover, group.get())) {
            return false;
        }
    }
    return true;
}

// Check the next few waiting groups in turn, and start the copies that can start.
bool start_some(Mover *mover) {
    Agenda &agenda = mover->books->agenda;
    std::size_t count = std::min(looks, agenda.line(Line::starts).size());
    for (std::size_t i = 0; i < count; i++) {
        Ref<Group> group = next_on(mover, Line::starts, &agenda.looked_at);
        if (!group) { // the last one was looked at: begin again
            agenda.looked_at = 0;
            group = next_on(mover, Line::starts, &agenda.looked_at);
        }
        if (group && may_start(agenda, group.get()) && !start(mover, group.get())) {
            return false;
        }
    }
    return true;
}

bool is_stash_full(const Mover *mover) {
    const Agenda &agenda = mover->books->agenda;
    std::size_t count = agenda.line(Line::leaves).size();
    return has_streams(mover->device()) &&
           (count > stash_groups ||
            (count > stash_least_groups && agenda.stash_bytes > stash_bytes));
}

// Release a group if its copy is complete.
bool release_copied(Mover *mover, Group *group) {
    agenda_remain(mover, group);
    return group_state(group) != SK_GROUP_CLEAN || group->storage == nullptr ||
           release(mover, group);
}

// Release groups in turn until one whose copy is not done.
bool release_all_copied(Mover *mover) {
    std::uint64_t turn = 0;
    while (Ref<Group> group = next_on(mover, Line::leaves, &turn)) {
        if (!is_settled(mover->books->agenda, group.get())) {
            continue;
        }
        int is_done = poll_out(mover, group.get());
        if (is_done == 0 && group->stash_bytes != 0 && is_stash_full(mover)) {
            is_done = finish_out(mover, group.get()) < 0 ? -1 : 1;
        }
        if (is_done != 1 || !release_copied(mover, group.get())) {
            return is_done == 0;
        }
    }
    return true;
}

// The first group that may leave now; null: there is none.
Group *next_to_leave(const Agenda &agenda) {
    Group *first = nullptr;
    for (Line line : {Line::leaves, Line::bound}) {
        auto found =
            std::find_if(agenda.line(line).begin(), agenda.line(line).end(),
                         [&](const auto &each) { return is_settled(agenda, each.second); });
        if (found != agenda.line(line).end() && (first == nullptr || found->first < first->turn)) {
            first = found->second;
        }
    }
    return first;
}

// Release the first group that may leave if its copy is done. 0: it is not, or there is none.
int release_next_copied(Mover *mover) {
    auto group = Ref<Group>::share(next_to_leave(mover->books->agenda));
    int is_done = group ? poll_out(mover, group.get()) : 0;
    return is_done == 1 && !release_copied(mover, group.get()) ? -1 : is_done;
}

// ---- coming back --------------------------------------------------------------------------------

// Start bringing a group back and cancel its departure. Release groups whose copies are done to
// make room. 0: there is no room yet.
int bring(Mover *mover, Group *group) {
    // A recomputed group has no copy to bring back.
    int started = group->storage != nullptr || is_recomputed(group) ? 1 : 0, is_released = 1;
    const bool is_room_planned = is_planned(group);
    while (started == 0 && is_released == 1) {
        started = is_room_planned ? bring_planned(mover, group) : bring_early(mover, group);
        is_released = started == 0 ? release_next_copied(mover) : 0;
    }
    if (started == 1) {
        stay(mover, group);
    }
    return is_released < 0 ? -1 : started;
}

// Remove the groups that backward has reached, at `serial`, from those that are coming.
void count_arrived(Agenda &agenda, std::uint64_t serial) {
    if (serial >= agenda.pass_serial) { // a new pass: groups that the last one did not use stay
        agenda.pass_serial = serial;
        agenda.coming_bytes = 0;
        agenda.coming.clear();
    }
    while (!agenda.coming.empty() && agenda.coming.front().serial >= serial) {
        agenda.coming_bytes -= agenda.coming.front().nbytes;
        agenda.coming.pop_front();
    }
}

} // namespace

// ---- setting departures and arrivals ------------------------------------------------------------

void agenda_move(Agenda &agenda, Group *group, Line line) {
    std::uint64_t turn = group->turn != 0 ? group->turn : ++agenda.turns;
    leave_line(agenda, group);
    group->turn = turn;
    group->line = line;
    agenda.line(line)[turn] = group;
    SWAPKIT_ASSERT(is_sound(agenda));
}

bool agenda_depart(Mover *mover, Group *group, const Departure &departure) {
    Agenda &agenda = mover->books->agenda;
    SWAPKIT_ASSERT(has_python() && departure.copy != CopyAt::never);
    agenda_remain(mover, group);
    group->departure = departure;
    group->departure.has_end = false;
    if (departure.has_end) {
        agenda_end_by(mover, group, departure.end);
    }
    if (departure.copy == CopyAt::pressure) {
        agenda_move(agenda, group, Line::ahead);
        return true;
    }
    agenda_move(agenda, group, Line::starts);
    agenda.newest_turn = group->turn;
    bool is_due = departure.copy == CopyAt::once && may_start(agenda, group);
    return !is_due || start(mover, group);
}

void agenda_end_by(Mover *mover, Group *group, Point end) {
    Agenda &agenda = mover->books->agenda;
    drop_end(agenda, group);
    group->departure.end = end;
    group->departure.has_end = true;
    agenda.schedule(end.clock).ends[{end.number, end.order}] = group;
}

void agenda_remain(Mover *mover, Group *group) {
    leave_line(mover->books->agenda, group);
    drop_end(mover->books->agenda, group);
}

void agenda_arrive(Mover *mover, Group *group, const Arrival &arrival) {
    Agenda &agenda = mover->books->agenda;
    drop_arrival(agenda, group);
    group->arrival = arrival;
    if (arrival.when == ComeAt::point) {
        agenda.schedule(arrival.at.clock).arrivals[{arrival.at.number, arrival.at.order}] = group;
    }
}

void agenda_needed(Mover *mover, Group *group) {
    if (is_planned(group)) {
        stay(mover, group);
    }
}

void agenda_unplan(Mover *mover, Group *group) {
    const Departure &departure = group->departure;
    const bool is_ended = departure.has_end && departure.end.clock == plan_clock; // by the plan
    if (!is_planned(group) && !is_ended) {
        return;
    }
    stay(mover, group);
    group->arrival = {};
    if (group->storage == nullptr) {
        agenda_note_out(mover, group);
    }
}

void agenda_revived(Mover *mover, Group *group) {
    bool has_left = group->line == Line::none && group->departure.copy != CopyAt::never;
    if (is_planned(group) && has_left) {
        agenda_move(mover->books->agenda, group, Line::leaves);
    }
}

void agenda_forget(Mover *mover, Group *group) {
    stay(mover, group);
    mover->books->agenda.out.erase(group->serial);
}

void agenda_note_out(Mover *mover, Group *group) {
    if (group->arrival.when == ComeAt::room && !is_recomputed(group)) {
        mover->books->agenda.out[group->serial] = group;
    }
}

bool send(Mover *mover, Group *group) {
    if (is_in_backward()) {
        return true; // saved by a recomputation: needed in a moment
    }
    Departure departure = {.copy = CopyAt::exclusive, .release = ReleaseAt::copied};
    Arrival arrival = {};
    if (group->terms.prefetch != no_prefetch && !timing_saved(mover, group, &departure, &arrival)) {
        return false;
    }
    // A group that the plan moves follows the scope from now on.
    const bool is_leaving =
        !is_planned(group) &&
        (group->line == Line::starts || group->line == Line::leaves || group->line == Line::bound);
    agenda_arrive(mover, group, arrival);
    if (!is_leaving && !agenda_depart(mover, group, departure)) {
        return false;
    }
    if (is_leaving && departure.has_end) { // saved again
        agenda_end_by(mover, group, departure.end);
    }
    return agenda_attend(mover, false);
}

// ---- doing due moves ----------------------------------------------------------------------------

bool agenda_attend(Mover *mover, bool is_end) {
    SWAPKIT_ASSERT(has_python() && is_sound(mover->books->agenda));
    return (is_end ? start_all(mover) : start_some(mover)) && release_all_copied(mover);
}

bool agenda_is_idle(const Mover *mover) {
    const Agenda &agenda = mover->books->agenda;
    return agenda.line(Line::starts).empty() && agenda.line(Line::leaves).empty();
}

bool agenda_release_now(Mover *mover, Group *group) {
    agenda_remain(mover, group);
    if (group_state(group) == SK_GROUP_RESIDENT && copy_out(mover, group) < 0) {
        return false; // otherwise: it was still waiting for its copy to start
    }
    if (group_state(group) == SK_GROUP_COPYING_OUT && finish_out(mover, group) < 0) {
        return false;
    }
    return release_copied(mover, group);
}

bool agenda_release_due(Mover *mover, std::uint64_t clock, std::int64_t number) {
    for (;;) {
        const ByPoint &ends = mover->books->agenda.schedule(clock).ends;
        if (ends.empty() || ends.begin()->first.first > number) {
            return true;
        }
        auto group = Ref<Group>::share(ends.begin()->second);
        const bool waits_for_others = group->departure.copy == CopyAt::exclusive &&
                                      group_state(group.get()) == SK_GROUP_RESIDENT &&
                                      !group_is_exclusive(group.get());
        if (waits_for_others) { // other holders may still write to it and keep its memory alive
            Point end = group->departure.end;
            end.number = number + 1;
            agenda_end_by(mover, group.get(), end);
        } else if (!agenda_release_now(mover, group.get()) ||
                   !timing_note(mover, clock, interned<"release">(), group.get(), number)) {
            return false;
        }
    }
}

int agenda_release_next(Mover *mover) {
    auto group = Ref<Group>::share(next_to_leave(mover->books->agenda));
    if (!group) {
        return 0;
    }
    return agenda_release_now(mover, group.get()) ? 1 : -1;
}

int agenda_bring_due(Mover *mover, std::uint64_t clock, std::int64_t number) {
    for (;;) {
        const ByPoint &arrivals = mover->books->agenda.schedule(clock).arrivals;
        if (arrivals.empty() || arrivals.begin()->first.first > number) {
            return 1;
        }
        auto group = Ref<Group>::share(arrivals.begin()->second);
        const bool was_out = group->storage == nullptr && !is_recomputed(group.get());
        int started = bring(mover, group.get());
        if (started != 1) {
            return started;
        }
        if (was_out && !timing_note(mover, clock, interned<"prefetch">(), group.get(), -number)) {
            return -1;
        }
    }
}

bool agenda_bring_before(Mover *mover, std::uint64_t serial) {
    Agenda &agenda = mover->books->agenda;
    count_arrived(agenda, serial);
    while (agenda.coming.size() < ahead_groups ||
           (agenda.coming.size() < ahead_most && agenda.coming_bytes < ahead_bytes)) {
        auto next =
            agenda.out.lower_bound(agenda.coming.empty() ? serial : agenda.coming.back().serial);
        if (next == agenda.out.begin()) {
            return true;
        }
        auto group = Ref<Group>::share(std::prev(next)->second);
        int started = bring_early(mover, group.get());
        if (started != 1) {
            return started == 0;
        }
        agenda.coming.push_back({.serial = group->serial, .nbytes = group->nbytes});
        agenda.coming_bytes += group->nbytes;
    }
    return true;
}

} // namespace swapkit
