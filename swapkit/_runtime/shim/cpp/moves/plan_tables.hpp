// plan_tables.hpp - the tables of a plan, for plan_cursor.cpp, which carries it out, and
// plan_cursor_type.cpp, which reads it from Python. Only these two files include this one.
#pragma once

#include "recompute/capturing.hpp"
#include "saved/carried.hpp"

#include <cstdint>
#include <vector>

namespace swapkit {

// The tables that Python passes consist of rows of 64-bit numbers.
// NOLINTBEGIN(performance-enum-size)
enum class Event : std::int64_t { first_save, save, use };
// NOLINTEND(performance-enum-size)
inline constexpr std::int64_t no_storage = -1;

struct Expected {
    std::int64_t storage; // no_storage: not in the plan
    std::int64_t nbytes;  // at the first save: of the storage (negative: any),
    std::int64_t tag;     // the module,
    std::int64_t index;   // and the number within its call
    Event kind;
};

// The plan for one storage. Of several storages that go (or come) at one event, the one with the
// lowest order is first.
struct Terminal {
    std::int64_t last_save; // the event
    std::int64_t tier;
    Action action;
    std::int64_t former; // the storage it continues after a backward pass; no_storage: none
    std::int64_t goes, goes_order; // the event; no_event: none
    std::int64_t comes, comes_order;
};

// A storage that continues another storage from an event on.
struct Due {
    std::int64_t event, storage;
};

// The state of a storage in this step.
struct Progress {
    Group *group;       // null: not saved yet, or destroyed
    const void *memory; // the group's storage when it was saved
    bool is_small;      // too small to move at this input length
};

struct Body {
    std::vector<Expected> events;
    std::vector<Terminal> storages;
    std::vector<Due> continuing; // by event
    std::vector<Progress> progress;
    std::size_t next_due = 0; // in `continuing`
    std::shared_ptr<const CaptureTable> captures;
    std::vector<std::uint64_t> captured; // number of captures per row
    Carried carried;
    bool has_carried = false; // `carried` has grown since the last use
};

struct Follower {
    PyObject ob_base;
    Mover *mover;    // owned
    PyObject *owner; // owned: notified of a deviation
    Body *body;
    unsigned long long position; // events so far
    unsigned long long late;     // uses that waited for the copy back
    unsigned long long refused;  // events at which a due prefetch found no room
    unsigned long long moved_bytes;
    char is_on;
    unsigned long untracked_thread; // the thread on which modules are not tracked; 0: none
};

// The next event if it is a first save; null: it is not, or no step is followed.
inline const Expected *first_save_next(const Follower *follower) {
    const std::vector<Expected> &events = follower->body->events;
    bool is_one = follower->is_on != 0 && follower->position < events.size() &&
                  events[follower->position].kind == Event::first_save;
    return is_one ? &events[follower->position] : nullptr;
}

} // namespace swapkit
