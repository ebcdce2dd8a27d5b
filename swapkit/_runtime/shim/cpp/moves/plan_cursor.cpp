// plan_cursor.cpp - carrying out a plan, event by event.
#include "moves/plan_cursor.hpp"

#include "held/held.hpp"

#include "moves/plan_tables.hpp"

namespace swapkit {

namespace {

constexpr std::int64_t none = -1; // for Python: not found

// The group of autograd's object, if it belongs to this mover; null otherwise.
Group *group_of(const Follower *follower, PyObject *packed) {
    const Handle *handle = as_handle(packed);
    Group *group = handle == nullptr ? nullptr : handle->group;
    return group != nullptr && group->mover == follower->mover ? group : nullptr;
}

bool is_recipe(PyObject *packed) {
    const Handle *handle = as_handle(packed);
    return handle == nullptr || (handle->group != nullptr && is_recomputed(handle->group));
}

// Whether the saved tensor stays where it is, whatever the plan says.
bool is_kept(PyObject *packed) {
    const Handle *handle = as_handle(packed);
    return handle != nullptr && handle->group == nullptr;
}

// ---- groups in the plan -------------------------------------------------------------------------

// For assertions: whether every group knows its number in the plan.
[[maybe_unused]] bool places_are_sound(const Body &body) {
    std::size_t number = 0, lost = 0;
    for (const Progress &each : body.progress) {
        number++;
        lost += each.group != nullptr && each.group->followed != number ? 1 : 0;
    }
    return lost == 0;
}

// Remove a group from the plan: memory pressure decides about it from now on.
void part(Follower *follower, Progress &progress) {
    Group *group = std::exchange(progress.group, nullptr);
    if (group == nullptr) {
        return;
    }
    group->followed = 0;
    agenda_unplan(follower->mover, group);
}

void part_all(Follower *follower) {
    Body &body = *follower->body;
    for (Progress &progress : body.progress) {
        part(follower, progress);
        progress = {};
    }
    body.carried.drop();
}

// Put a group into the plan. False: it already was there as this storage.
bool join(Follower *follower, std::int64_t storage, Group *group) {
    Progress &progress = follower->body->progress[static_cast<std::size_t>(storage)];
    if (progress.group == group) {
        return false;
    }
    part(follower, progress); // the group of an earlier version
    if (group->followed != 0) {
        part(follower, follower->body->progress[group->followed - 1]);
    }
    progress.group = group;
    progress.memory = group->key.storage;
    group->followed = static_cast<std::uint32_t>(storage) + 1;
    SWAPKIT_ASSERT(places_are_sound(*follower->body));
    return true;
}

// Notify the owner that the event at `position` was unexpected, and end the plan. The position is
// passed in, because other threads may count events while this one waits for the lock.
bool deviate(Follower *follower, std::size_t position, bool is_save, PyObject *packed) {
    Locked lock(follower->mover);
    if (!lock || follower->is_on == 0) {
        return static_cast<bool>(lock); // another thread's event was the first
    }
    const Group *group = group_of(follower, packed);
    Ref<> found = Ref<>::steal(Py_BuildValue(
        "(nOLLLO)", static_cast<Py_ssize_t>(position), is_save ? Py_True : Py_False,
        static_cast<long long>(group == nullptr ? none : group->tag),
        static_cast<long long>(group == nullptr ? none : static_cast<long long>(group->nbytes)),
        static_cast<long long>(group == nullptr ? none
                                                : static_cast<long long>(group->followed) - 1),
        is_recipe(packed) ? Py_True : Py_False));
    follower->is_on = 0;
    part_all(follower);
    auto owner = Ref<>::share(follower->owner);
    return found && call_method<"deviated">(owner.get(), found.get());
}

// ---- whether an event is as expected ------------------------------------------------------------

// Count an event and return the expected one; null: none. `position_out`: the event's position.
const Expected *next_event(Follower *follower, std::size_t *position_out) {
    const Body &body = *follower->body;
    std::size_t position = follower->position++;
    follower->mover->books->agenda.events = static_cast<std::int64_t>(follower->position);
    *position_out = position;
    return position < body.events.size() ? &body.events[position] : nullptr;
}

// Whether a storage of the plan is too small to move at this input length.
bool is_small(const Body &body, std::int64_t storage) {
    while (storage != no_storage && !body.progress[static_cast<std::size_t>(storage)].is_small) {
        storage = body.storages[static_cast<std::size_t>(storage)].former;
    }
    return storage != no_storage;
}

// Whether a saved tensor stays where it is because it is too small, as far as can be told.
bool is_expected_kept(const Follower *follower, const Expected &event, PyObject *packed) {
    if (!is_kept(packed)) {
        return false;
    }
    if (event.kind != Event::first_save) {
        return is_small(*follower->body, event.storage);
    }
    const bool is_any = event.nbytes < 0; // the plan is for inputs of any length
    follower->body->progress[static_cast<std::size_t>(event.storage)].is_small = is_any;
    return is_any;
}

bool is_expected_save(const Follower *follower, const Expected &event, PyObject *packed,
                      bool is_new) {
    if (event.kind == Event::use || event.storage == no_storage) {
        return event.kind != Event::use;
    }
    if (is_expected_kept(follower, event, packed)) {
        return true;
    }
    const Group *group = group_of(follower, packed);
    auto storage = static_cast<std::size_t>(event.storage);
    if (follower->body->storages[storage].action == Action::recompute) {
        return is_recipe(packed);
    }
    if (group == nullptr || is_recomputed(group)) {
        return false;
    }
    if (event.kind == Event::first_save) {
        const bool is_any = event.nbytes < 0; // the plan is for inputs of any length
        return (is_any || static_cast<std::int64_t>(group->nbytes) == event.nbytes) &&
               (!is_new || group->tag == event.tag);
    }
    return group->followed == storage + 1 ||
           (group->followed == 0 && // at a later version
            group->key.storage == follower->body->progress[storage].memory);
}

bool is_expected_use(const Follower *follower, const Expected &event, PyObject *packed) {
    if (event.kind != Event::use) {
        return false;
    }
    const Group *group = group_of(follower, packed);
    if (event.storage == no_storage) {
        return group == nullptr || group->followed == 0;
    }
    if (is_expected_kept(follower, event, packed)) {
        return true;
    }
    auto storage = static_cast<std::size_t>(event.storage);
    if (follower->body->storages[storage].action == Action::recompute && group == nullptr) {
        return is_recipe(packed);
    }
    return group != nullptr && group->followed == storage + 1;
}

// ---- due moves; the lock is held ----------------------------------------------------------------

// Set the departure and arrival of a storage that is saved now, as planned.
bool send_out(Follower *follower, std::int64_t storage) {
    Mover *mover = follower->mover;
    const Terminal &terminal = follower->body->storages[static_cast<std::size_t>(storage)];
    auto group =
        Ref<Group>::share(follower->body->progress[static_cast<std::size_t>(storage)].group);
    if (group->terms.action != Action::automatic) {
        return true; // a user's choice takes precedence
    }
    group->terms.tier = static_cast<sk_tier>(terminal.tier);
    follower->moved_bytes += group->nbytes;
    auto point = [](std::int64_t event, std::int64_t order) {
        return Point{
            .clock = plan_clock, .number = event, .order = static_cast<std::uint64_t>(order)};
    };
    const bool has_end = terminal.goes != no_event;
    // Without a pool, memory requests cannot trigger a release: release as early as possible.
    const bool can_wait = has_end && mover->pool != 0;
    agenda_arrive(mover, group.get(),
                  {.when = terminal.comes != no_event ? ComeAt::point : ComeAt::use,
                   .at = point(terminal.comes, terminal.comes_order)});
    return agenda_depart(mover, group.get(),
                         {.copy = CopyAt::once,
                          .release = can_wait ? ReleaseAt::pressure : ReleaseAt::copied,
                          .has_end = has_end,
                          .end = point(terminal.goes, terminal.goes_order),
                          .last_save = terminal.last_save});
}

// Hand a storage the group of the storage that it continues. The group may leave once more.
bool carry_on(Follower *follower, std::int64_t storage) {
    Body &body = *follower->body;
    const Terminal &terminal = body.storages[static_cast<std::size_t>(storage)];
    std::int64_t former = terminal.former;
    // A storage in between that autograd neither saved nor used never got the group.
    while (former != no_storage &&
           body.progress[static_cast<std::size_t>(former)].group == nullptr) {
        former = body.storages[static_cast<std::size_t>(former)].former;
    }
    if (former == no_storage) {
        return true; // the group is gone
    }
    Progress &progress = body.progress[static_cast<std::size_t>(storage)];
    part(follower, progress);
    progress = std::exchange(body.progress[static_cast<std::size_t>(former)], Progress{});
    progress.group->followed = static_cast<std::uint32_t>(storage) + 1;
    agenda_needed(follower->mover, progress.group); // its former moves are over
    if (terminal.action == Action::recompute && is_recomputed(progress.group)) {
        forget_computed(follower->mover, progress.group); // recompute for each backward pass
    }
    return terminal.action != Action::swap || send_out(follower, storage);
}

bool continues_now(const Follower *follower) {
    const Body &body = *follower->body;
    return body.next_due < body.continuing.size() &&
           body.continuing[body.next_due].event < static_cast<std::int64_t>(follower->position);
}

// The number of the latest event.
std::int64_t last_event(const Follower *follower) {
    return static_cast<std::int64_t>(follower->position) - 1;
}

// Do the moves that must come first: continue storages, then release.
bool release_due(Follower *follower) {
    while (follower->is_on != 0 && continues_now(follower)) {
        if (!carry_on(follower, follower->body->continuing[follower->body->next_due++].storage)) {
            return false;
        }
    }
    return agenda_release_due(follower->mover, plan_clock, last_event(follower));
}

bool bring_due(Follower *follower) {
    int has_room = agenda_bring_due(follower->mover, plan_clock, last_event(follower));
    follower->refused += has_room == 0 ? 1 : 0;
    return has_room >= 0 && (!held_comes(follower->mover->books->held, last_event(follower)) ||
                             held_bring(follower->mover, last_event(follower)));
}

bool is_due(const ByPoint &points, const Follower *follower) {
    return !points.empty() && points.begin()->first.first <= last_event(follower);
}

bool has_release_due(const Follower *follower) {
    return continues_now(follower) || is_due(follower->mover->books->agenda.plan.ends, follower);
}

// Finish an event.
bool end_event(Follower *follower) {
    Mover *mover = follower->mover;
    if (follower->is_on == 0 || (agenda_is_idle(mover) && !has_release_due(follower) &&
                                 !is_due(mover->books->agenda.plan.arrivals, follower) &&
                                 !held_comes(mover->books->held, last_event(follower)))) {
        return true;
    }
    Locked lock(mover);
    return lock && release_due(follower) && agenda_attend(mover, false) && bring_due(follower);
}

} // namespace

// ---- events -------------------------------------------------------------------------------------

bool is_following(const Mover *mover) {
    return mover->follower != nullptr && mover->follower->is_on != 0;
}

// Apply the plan to a group saved at an expected event. Returns as `follow_save`.
static int take_save(Follower *follower, const Expected &event, Group *group) {
    std::int64_t storage = event.storage;
    Locked lock(follower->mover);
    if (!lock || follower->is_on == 0) {
        return lock ? 0 : -1;
    }
    const bool is_first = join(follower, storage, group);
    if (is_recomputed(group) && event.kind == Event::first_save) { // it has no site yet
        group->tag = static_cast<std::uint32_t>(event.tag);
    }
    auto action = follower->body->storages[static_cast<std::size_t>(storage)].action;
    return action != Action::swap || !is_first || send_out(follower, storage) ? 1 : -1;
}

int follow_save(Mover *mover, PyObject *packed, bool is_new) {
    auto follower = Ref<Follower>::share(mover->follower);
    std::size_t position = 0;
    const Expected *event = next_event(follower.get(), &position);
    if (event == nullptr || !is_expected_save(follower.get(), *event, packed, is_new)) {
        return deviate(follower.get(), position, true, packed) ? 0 : -1;
    }
    Group *group = group_of(follower.get(), packed);
    if (event->storage != no_storage && group != nullptr) {
        int is_taken = take_save(follower.get(), *event, group);
        if (is_taken != 1) {
            return is_taken;
        }
    }
    return end_event(follower.get()) ? 1 : -1;
}

bool follow_use(Mover *mover, PyObject *packed) {
    auto follower = Ref<Follower>::share(mover->follower);
    std::size_t position = 0;
    const Expected *event = next_event(follower.get(), &position);
    if (event == nullptr || !is_expected_use(follower.get(), *event, packed)) {
        return deviate(follower.get(), position, false, packed);
    }
    if (follower->body->has_carried) {
        Locked lock(mover);
        if (!lock) {
            return false;
        }
        follower->body->carried.sweep();
        follower->body->has_carried = false;
    }
    if (!has_release_due(follower.get())) {
        return true;
    }
    Locked lock(mover);
    return lock && release_due(follower.get());
}

bool follow_used(Mover *mover, bool has_waited) {
    if (!is_following(mover)) {
        return true;
    }
    auto follower = Ref<Follower>::share(mover->follower);
    follower->late += has_waited ? 1 : 0;
    return end_event(follower.get());
}

void follower_capture(Follower *follower) {
    capture_from(follower, follower->body->captures, follower->position);
}

bool follower_is_at(const Follower *follower, const CaptureTable *table, std::uint64_t position) {
    return follower != nullptr && follower->is_on != 0 && follower->position == position &&
           follower->body->captures.get() == table;
}

void follower_carry(Follower *follower, const CaptureTable *table, std::size_t row,
                    std::vector<Ref<Group>> groups) {
    if (follower == nullptr || follower->is_on == 0 || follower->body->captures.get() != table) {
        return; // the plan has changed: drop the groups
    }
    Body &body = *follower->body;
    body.captured[row]++;
    body.has_carried = true;
    body.carried.add(std::move(groups));
}

void follower_forget(Follower *follower, const Group *group) {
    if (follower == nullptr || group->followed == 0) {
        return;
    }
    Progress &progress = follower->body->progress[group->followed - 1];
    if (progress.group == group) {
        progress.group = nullptr;
    }
}

bool follower_finds_site(const Follower *follower, Group *group) {
    bool is_here = follower != nullptr && follower->untracked_thread == PyThread_get_thread_ident();
    const Expected *event = is_here ? first_save_next(follower) : nullptr;
    if (event != nullptr) {
        group->tag = static_cast<std::uint32_t>(event->tag);
        group->index = static_cast<std::uint32_t>(event->index);
    }
    return event != nullptr;
}

void follower_end(Follower *follower) {
    follower->is_on = 0;
    part_all(follower);
}

} // namespace swapkit
