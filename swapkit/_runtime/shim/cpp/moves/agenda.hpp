// agenda.hpp - when groups leave the device, and when they come back.
//
// Each group has a *departure* (when its copy starts, and when its memory is freed) and an
// *arrival* (when it comes back); see `saved_tensors.hpp`. The code that moves groups sets them:
//
//                         copy       release   end        arrival
//   a scope that swaps    exclusive  copied    -          room
//   with `prefetch=n`     exclusive  pressure  operator   operator    `prefetch.cpp`
//   a plan                once       pressure  event      event, use  `plan_cursor.cpp`
//   a plan without a pool once       copied    event      event, use
//   write-behind          pressure   pressure  -          room        `write_behind.cpp`
//
// This file has the lists of groups that leave and that come back. It does the work that is due at
// the end of each hook, at operators, and when memory is requested. Callers hold the runtime's lock
// and the GIL; the destruction of a group holds the GIL alone. Functions that may fail set an
// exception and return false (bool) or -1 (int).
#ifndef SWAPKIT_AGENDA_HPP
#define SWAPKIT_AGENDA_HPP

#include "saved/saved_tensors.hpp"

#include <array>
#include <deque>
#include <map>
#include <utility>

namespace swapkit {

using BySerial = std::map<std::uint64_t, Group *>;

// Groups by the point of one clock at which they are due, soonest first.
using ByPoint = std::map<std::pair<std::int64_t, std::uint64_t>, Group *>;

struct Schedule {
    ByPoint ends;     // of departures
    ByPoint arrivals; // of groups that are out or have yet to leave
};

// A group that is being prefetched.
struct Coming {
    std::uint64_t serial;
    std::size_t nbytes;
};

struct Agenda {
    std::array<BySerial, line_count> lines; // leaving, by turn
    std::uint64_t turns = 0;
    std::uint64_t newest_turn = 0; // of the latest group that was saved and sent
    std::uint64_t looked_at = 0;   // the turn up to which `start_some` has checked
    std::size_t stash_bytes = 0;
    Schedule plan; // by event of the step
    std::int64_t events = 0;
    std::map<std::uint64_t, Schedule> threads; // by operator of the thread
    BySerial out;              // groups that come back as soon as there is room, by age
    std::deque<Coming> coming; // prefetched from `out`, soonest use first
    std::size_t coming_bytes = 0;
    std::uint64_t pass_serial = 0; // serial at which the current backward pass began

    BySerial &line(Line which) { return lines[static_cast<std::size_t>(which)]; }
    const BySerial &line(Line which) const { return lines[static_cast<std::size_t>(which)]; }
    Schedule &schedule(std::uint64_t clock) { return clock == plan_clock ? plan : threads[clock]; }
};

// ---- setting departures and arrivals ------------------------------------------------------------

// Set a group's departure, replacing the previous one. Start the copy now if it is allowed to.
bool agenda_depart(Mover *mover, Group *group, const Departure &departure);
// Change the point by which a leaving group has to be released.
void agenda_end_by(Mover *mover, Group *group, Point end);
// Move a group to another line. It keeps its turn, or gets the last one if it was on no line.
void agenda_move(Agenda &agenda, Group *group, Line line);
// Cancel the departure of a group.
void agenda_remain(Mover *mover, Group *group);
// Set how a group comes back once it is out.
void agenda_arrive(Mover *mover, Group *group, const Arrival &arrival);
// Note that a group is needed. A group that the plan moves stays from now on.
void agenda_needed(Mover *mover, Group *group);
// Let memory pressure decide about a group that the plan moves. Other groups do not change.
void agenda_unplan(Mover *mover, Group *group);
// Note that a storage was still alive elsewhere. If the plan had evicted its group, evict it again.
void agenda_revived(Mover *mover, Group *group);
// Remove a group from all lists.
void agenda_forget(Mover *mover, Group *group);
// Note that a group is out.
void agenda_note_out(Mover *mover, Group *group);
// Evict a scope's group as soon as only the graph holds its storage.
bool send(Mover *mover, Group *group);

// ---- doing due moves ----------------------------------------------------------------------------

// Start waiting copies, and release groups whose copies are done. `is_end`: no save follows for
// now, so start all copies that scopes have sent.
bool agenda_attend(Mover *mover, bool is_end);
// Return whether `agenda_attend` has nothing to do.
bool agenda_is_idle(const Mover *mover);
// Release the groups whose end is due at this number of a clock. Waits for their copies.
bool agenda_release_due(Mover *mover, std::uint64_t clock, std::int64_t number);
// Release a leaving group now. Waits for its copy.
bool agenda_release_now(Mover *mover, Group *group);
// Release the group that was sent first. 0: no group may leave.
int agenda_release_next(Mover *mover);
// Start the prefetches that are due. 0: one found no room, and the later ones wait.
int agenda_bring_due(Mover *mover, std::uint64_t clock, std::int64_t number);
// Start prefetching groups saved before `serial`, as far as there is room.
bool agenda_bring_before(Mover *mover, std::uint64_t serial);

} // namespace swapkit

#endif
