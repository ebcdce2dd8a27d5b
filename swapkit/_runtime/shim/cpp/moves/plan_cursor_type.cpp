// plan_cursor_type.cpp - the Python type `Follower`, and reading the tables of a plan.
#include "moves/plan_cursor.hpp"

#include "moves/plan_tables.hpp"

#include <algorithm>

namespace swapkit {

namespace {

bool is_sound(const Body &body) {
    auto count = static_cast<std::int64_t>(body.storages.size());
    auto is_one = [count](std::int64_t storage) { return 0 <= storage && storage < count; };
    bool are_older = true; // otherwise `former` chains could be endless
    for (std::int64_t storage = 0; storage < count; storage++) {
        std::int64_t former = body.storages[static_cast<std::size_t>(storage)].former;
        are_older = are_older && no_storage <= former && former < storage;
    }
    return are_older &&
           std::all_of(body.events.begin(), body.events.end(),
                       [&](const Expected &event) {
                           return event.storage == no_storage || is_one(event.storage);
                       }) &&
           std::all_of(body.continuing.begin(), body.continuing.end(),
                       [&](const Due &due) { return is_one(due.storage); });
}

// Follower(mover, owner, events, storages, continuing): the last three are bytes, rows of 64-bit
// numbers.
bool follower_make(Follower *follower, Mover *mover, PyObject *owner, const Bytes &events,
                   const Bytes &storages, const Bytes &continuing) {
    follower->mover = Ref<Mover>::share(mover).release();
    follower->owner = Py_NewRef(owner);
    Body *body = follower->body = new Body;
    if (!events.read_rows(&body->events) || !storages.read_rows(&body->storages) ||
        !continuing.read_rows(&body->continuing)) {
        return false;
    }
    if (!is_sound(*body)) {
        PyErr_SetString(PyExc_ValueError, "a table names an unknown storage");
        return false;
    }
    body->progress.resize(body->storages.size());
    return true;
}

// capture(rows): set which operators are recomputed, from the next step on.
bool follower_capture_rows(Follower *follower, const Bytes &rows) {
    Body *body = follower->body;
    std::shared_ptr<const CaptureTable> table = capture_table(rows, body->events.size());
    if (table == nullptr) {
        return false;
    }
    body->captures = std::move(table);
    body->captured.assign(capture_count(*body->captures), 0);
    return true;
}

// captured(): return the number of captures of each row.
Ref<> follower_captured(const Follower *follower) {
    return list_of(follower->body->captured, for_python<std::uint64_t>);
}

// reset(): begin a step. Here and below the lock is held.
void follower_reset(Follower *follower) {
    follower_end(follower);
    follower->body->next_due = 0;
    follower->position = follower->late = follower->refused = follower->moved_bytes = 0;
    follower->mover->books->agenda.events = 0;
    follower->is_on = 1;
    follower_capture(follower);
}

// set_untracked(is_untracked): set whether modules are not tracked on this thread. At most one
// thread is untracked.
void follower_set_untracked(Follower *follower, bool is_untracked) {
    if (is_untracked) {
        follower->untracked_thread = PyThread_get_thread_ident();
    } else if (follower->untracked_thread == PyThread_get_thread_ident()) {
        follower->untracked_thread = 0;
    }
}

// site(): return (tag, index) of the next event if it is a first save, else None.
PyObject *follower_site(const Follower *follower) {
    const Expected *event = first_save_next(follower);
    if (event == nullptr) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("LL", static_cast<long long>(event->tag),
                         static_cast<long long>(event->index));
}

// recompute(storage): recompute a storage of the plan now if it was saved, and there is room.
bool follower_recompute(Follower *follower, std::size_t storage) {
    const std::vector<Progress> &progress = follower->body->progress;
    auto group = Ref<Group>::share(storage < progress.size() ? progress[storage].group : nullptr);
    int is_made = follower->is_on != 0 && group ? recompute_early(follower->mover, group.get()) : 1;
    follower->refused += is_made == 0 ? 1 : 0;
    return is_made >= 0;
}

void follower_free(Follower *follower) {
    if (follower->body != nullptr) {
        follower_end(follower);
    }
    delete follower->body;
}

using FollowerLife = Life<Follower, MadeBy<follower_make>, Freed<follower_free>,
                          Cleared<&Follower::owner>, Visited<&Follower::mover>>;

} // namespace

// end(): stop following until a step begins.
Type follower_type(FollowerLife(), "Follower",
                   "Follows a plan: does what is due at each event of a step.",
                   method<"capture", follower_capture_rows>(),
                   method<"captured", follower_captured>(), method<"reset", follower_reset>(),
                   method<"end", follower_end>(), method<"set_untracked", follower_set_untracked>(),
                   method<"recompute", follower_recompute>(), method<"site", follower_site>(),
                   field("is_on", &Follower::is_on), field("position", &Follower::position),
                   field("late", &Follower::late), field("refused", &Follower::refused),
                   field("moved_bytes", &Follower::moved_bytes));

} // namespace swapkit
