// plan_tables.hpp - a plan as plan_cursor.cpp carries it out, and as Python hands it over
// (plan_cursor_type.cpp): these two alone include this.
#pragma once

#include "recompute/capturing.hpp"
#include "saved/carried.hpp"

#include <cstdint>
#include <vector>

namespace swapkit {

// The words of the tables that Python hands over, each of rows of 64-bit numbers.
// NOLINTBEGIN(performance-enum-size)
enum class Event : std::int64_t { first_save, save, use };
// NOLINTEND(performance-enum-size)
inline constexpr std::int64_t no_storage = -1;

struct Expected {
    std::int64_t storage; // no_storage: nothing that a plan knows
    std::int64_t nbytes;  // of the storage, where it is saved first (negative: any),
    std::int64_t tag;     // and the module,
    std::int64_t index;   // and number within its call
    Event kind;
};

// What is done with a storage. Of two that go, or come, at one event the one with the lower order
// is the first.
struct Terminal {
    std::int64_t last_save; // the event
    std::int64_t tier;
    Action action;
    std::int64_t former; // the storage that it continues after a backward pass; no_storage: none
    std::int64_t goes, goes_order; // the event; no_event: none is named
    std::int64_t comes, comes_order;
};

// A storage that continues another one from an event on.
struct Due {
    std::int64_t event, storage;
};

// What became of a storage in this step.
struct Progress {
    Group *group;       // null: not saved yet, or gone
    const void *memory; // of the group when it was saved
    bool is_small;      // too small to be moved, at this length
};

struct Body {
    std::vector<Expected> events;
    std::vector<Terminal> storages;
    std::vector<Due> continuing; // by event
    std::vector<Progress> progress;
    std::size_t next_due = 0; // of those that continue
    std::shared_ptr<const CaptureTable> captures;
    std::vector<std::uint64_t> captured; // how often each row was
    Carried carried;
    bool has_carried = false; // something since the last use
};

struct Follower {
    PyObject ob_base;
    Mover *mover;    // owned
    PyObject *owner; // owned: who is told of a deviation
    Body *body;
    unsigned long long position; // events so far
    unsigned long long late;     // storages that were waited for where they were used,
    unsigned long long refused;  // and that found no room when they were due
    unsigned long long moved_bytes;
    char is_on;
    unsigned long resting; // the thread on which nobody hears of modules; 0: none
};

} // namespace swapkit
