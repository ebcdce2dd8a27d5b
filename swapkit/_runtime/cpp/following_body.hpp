// following_body.hpp - a plan as following.cpp carries it out, and as Python hands it over
// (follower_type.cpp): these two alone include this.
#pragma once

#include "capturing.hpp"
#include "carried.hpp"

#include <cstdint>
#include <deque>
#include <vector>

namespace swapkit {

// The words of the three tables that Python hands over, each a row of 64-bit numbers.
// NOLINTBEGIN(performance-enum-size)
enum class Event : std::int64_t { first_save, save, use };
enum class Treatment : std::int64_t { keep, swap, recompute };
enum class Turn : std::int64_t { continues, goes, comes };
// NOLINTEND(performance-enum-size)
inline constexpr std::int64_t no_storage = -1;

struct Expected {
    std::int64_t storage; // no_storage: nothing that a plan knows
    std::int64_t nbytes;  // of the storage, where it is saved first (negative: any),
    std::int64_t tag;     // and the module,
    std::int64_t index;   // and number within its call
    Event kind;
};

struct Terminal {
    std::int64_t last_save; // the event
    std::int64_t tier;
    Treatment treatment;
    std::int64_t former; // the storage that it continues after a backward pass; no_storage: none
};

struct Due {
    std::int64_t event, storage;
    Turn turn;
};

// What became of a storage in this step.
struct Progress {
    Group *group;       // null: not saved yet, or gone
    const void *memory; // of the group when it was saved
    bool is_leaving;    // among those that wait for their copies out
    bool is_revived;    // it is among them once more: the event by which it goes may have been
    bool is_back;       // needed again, or about to be: it does not leave any more
    bool is_small;      // too small to be moved, at this length
};

struct Body {
    std::vector<Expected> events;
    std::vector<Terminal> storages;
    std::vector<Due> dues; // by event
    std::vector<Progress> progress;
    std::vector<bool> has_end;         // whether an event is named by which a storage goes
    std::deque<std::int64_t> leaving;  // in the order of their copies
    std::vector<std::int64_t> watched; // of these: what is not left to the event that is named
    std::deque<std::int64_t> coming;   // those that were due, in order
    std::size_t next_due = 0;
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
    unsigned long resting; // the thread on which nobody hears of modules (`resting.py`); 0: none
};

// Wait for the oldest copy of what was sent out, and give up its memory. 0: there is none; -1: an
// exception is set. The lock is held.
int follower_release_next(Follower *follower);

} // namespace swapkit
