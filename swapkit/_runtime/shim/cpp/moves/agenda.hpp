// agenda.hpp - when groups leave the device, and when they come back.
//
// Each group has a *departure*: when its copy starts, and when its memory goes; and an *arrival*:
// when it comes back (`saved_tensors.hpp`). Whoever moves groups fills these in:
//
//                         copy       release   end        arrival
//   a scope that swaps    exclusive  copied    -          room
//   with `prefetch=n`     exclusive  pressure  operator   operator    `prefetch.cpp`
//   a plan                once       pressure  event      event, use  `plan_cursor.cpp`
//   one without a pool    once       copied    event      event, use
//   write-behind          pressure   pressure  -          room        `write_behind.cpp`
//
// The rest is here: one list out and one back, and what is due on them, at the end of each hook, at
// operators, and where memory is asked for. The runtime's lock is held, and the interpreter, in all
// of it but where groups go, which happens with the interpreter alone. Functions that may fail
// return bool with false, or int with -1, and an exception is set then.
#ifndef SWAPKIT_AGENDA_HPP
#define SWAPKIT_AGENDA_HPP

#include "saved/saved_tensors.hpp"

#include <array>
#include <deque>
#include <map>
#include <utility>

namespace swapkit {

using BySerial = std::map<std::uint64_t, Group *>;

// What is due at the points of one clock, the soonest first.
using ByPoint = std::map<std::pair<std::int64_t, std::uint64_t>, Group *>;

struct Schedule {
    ByPoint ends;     // of departures
    ByPoint arrivals; // of groups that are out, or still have to leave
};

// A group on its way back ahead of its use.
struct Coming {
    std::uint64_t serial;
    std::size_t nbytes;
};

struct Agenda {
    std::array<BySerial, line_count> lines; // out: by turn
    std::uint64_t turns = 0;
    std::uint64_t newest_turn = 0; // of what was the last to be saved and sent
    std::uint64_t looked_at = 0;   // the turn of the last that was asked whether its copy may start
    std::size_t stash_bytes = 0;
    Schedule plan; // by the events of a step
    std::int64_t events = 0;
    std::map<std::uint64_t, Schedule> threads; // by their operators
    BySerial out;              // back: what is out and comes as early as there is room, by age
    std::deque<Coming> coming; // of these, the soonest first
    std::size_t coming_bytes = 0;
    std::uint64_t pass_serial = 0; // where the backward pass under way began

    BySerial &line(Line which) { return lines[static_cast<std::size_t>(which)]; }
    const BySerial &line(Line which) const { return lines[static_cast<std::size_t>(which)]; }
    Schedule &schedule(std::uint64_t clock) { return clock == plan_clock ? plan : threads[clock]; }
};

// ---- filling it in ------------------------------------------------------------------------------

// Let a group leave as a departure says, instead of as before. What may be done at once is.
bool agenda_depart(Mover *mover, Group *group, const Departure &departure);
// Let the memory of a group that leaves go by another point.
void agenda_end_by(Mover *mover, Group *group, Point end);
// Let a group be on another line: in its turn, or as the last if it was on none.
void agenda_move(Agenda &agenda, Group *group, Line line);
// Let a group stay.
void agenda_remain(Mover *mover, Group *group);
// Let a group come back as an arrival says, once it is out.
void agenda_arrive(Mover *mover, Group *group, const Arrival &arrival);
// A group is needed: one that a plan moves stays.
void agenda_needed(Mover *mover, Group *group);
// Let a group that a plan moves be one that memory decides about; of others nothing changes.
void agenda_unplan(Mover *mover, Group *group);
// A group that a plan moves has a storage again because somebody keeps it: it leaves once more.
void agenda_revived(Mover *mover, Group *group);
// A group has a place in no list any more.
void agenda_forget(Mover *mover, Group *group);
// A group is out now.
void agenda_note_out(Mover *mover, Group *group);
// Let a scope's group leave as soon as only the graph has its storage.
bool send(Mover *mover, Group *group);

// ---- what is due --------------------------------------------------------------------------------

// Start copies that waited, and release groups whose copies are done. `is_end`: nothing more is
// saved for now, and all that scopes send out leaves.
bool agenda_attend(Mover *mover, bool is_end);
// Whether that has nothing to look at.
bool agenda_is_idle(const Mover *mover);
// Release what has to be gone by a clock's number, waiting for copies.
bool agenda_release_due(Mover *mover, std::uint64_t clock, std::int64_t number);
// Give up the memory of a group that leaves, waiting for its copy.
bool agenda_release_now(Mover *mover, Group *group);
// The same of the one that was sent out first. 0: there is none.
int agenda_release_next(Mover *mover);
// Start copies back that are due. 0: one found no room, and those after it wait.
int agenda_bring_due(Mover *mover, std::uint64_t clock, std::int64_t number);
// Start bringing back what was saved before `serial`, as far as there is room.
bool agenda_bring_before(Mover *mover, std::uint64_t serial);

} // namespace swapkit

#endif
