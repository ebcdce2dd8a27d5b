// following.cpp - carrying a plan out, event by event.
#include "following.hpp"

#include "following_body.hpp"

namespace swapkit {

namespace {

constexpr std::int64_t none = -1; // for Python: nothing was found there

// The group of this mover that autograd's object stands for.
Group *group_of(const Follower *follower, PyObject *packed) {
    if (Py_TYPE(packed) != &handle_type) {
        return nullptr;
    }
    Group *group = reinterpret_cast<Handle *>(packed)->group;
    return group != nullptr && group->mover == follower->mover ? group : nullptr;
}

bool is_recipe(PyObject *packed) {
    if (Py_TYPE(packed) != &handle_type) {
        return true;
    }
    const Group *group = reinterpret_cast<Handle *>(packed)->group;
    return group != nullptr && is_recomputed(group);
}

// Whether it stays as it is, whatever a plan says.
bool is_kept(PyObject *packed) {
    return Py_TYPE(packed) == &handle_type && reinterpret_cast<Handle *>(packed)->group == nullptr;
}

// ---- who is in the plan -------------------------------------------------------------------------

// For assertions: whether every group knows its place in the plan.
[[maybe_unused]] bool places_are_sound(const Body &body) {
    std::size_t leaving = 0, number = 0, lost = 0;
    for (const Progress &each : body.progress) {
        number++;
        leaving += each.is_leaving ? 1 : 0;
        lost += each.group != nullptr && each.group->followed != number ? 1 : 0;
    }
    return lost == 0 && leaving == body.leaving.size();
}

// Let a group be one that memory decides about.
void part(Follower *follower, Progress &progress) {
    Group *group = std::exchange(progress.group, nullptr);
    if (group == nullptr) {
        return;
    }
    group->followed = 0;
    bool was_planned = std::exchange(group->is_planned, 0) != 0;
    if (was_planned && group->storage == nullptr && group->terms.prefetch == no_prefetch &&
        !is_recomputed(group)) {
        follower->mover->books->out[group->serial] = group; // back as early as memory allows
    }
}

void part_all(Follower *follower) {
    Body &body = *follower->body;
    for (Progress &progress : body.progress) {
        part(follower, progress);
        progress = {};
    }
    body.leaving.clear();
    body.watched.clear();
    body.coming.clear();
    body.carried.drop();
}

void join(Follower *follower, std::int64_t storage, Group *group) {
    Progress &progress = follower->body->progress[static_cast<std::size_t>(storage)];
    if (progress.group == group) {
        return;
    }
    part(follower, progress); // of a former version
    if (group->followed != 0) {
        part(follower, follower->body->progress[group->followed - 1]);
    }
    progress.group = group;
    progress.memory = group->key.storage;
    group->followed = static_cast<std::uint32_t>(storage) + 1;
    SWAPKIT_ASSERT(places_are_sound(*follower->body));
}

// Tell the owner that the event at `position` was not as expected, and let everything be as without
// a plan. Waiting for the lock lets other threads' events be counted, so the position comes along.
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

// Count an event; `position` is its own.
const Expected *next_event(Follower *follower, std::size_t *position_out) {
    const Body &body = *follower->body;
    std::size_t position = follower->position++;
    *position_out = position;
    return position < body.events.size() ? &body.events[position] : nullptr;
}

// Whether a storage of the plan is one that is too small to be moved in inputs of this length.
bool is_small(const Body &body, std::int64_t storage) {
    while (storage != no_storage && !body.progress[static_cast<std::size_t>(storage)].is_small) {
        storage = body.storages[static_cast<std::size_t>(storage)].former;
    }
    return storage != no_storage;
}

// Whether what stays where it is stays for that reason, as far as can be told.
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
    if (follower->body->storages[storage].treatment == Treatment::recompute) {
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
    if (follower->body->storages[storage].treatment == Treatment::recompute && group == nullptr) {
        return is_recipe(packed);
    }
    return group != nullptr && group->followed == storage + 1;
}

// ---- what is due; the lock is held --------------------------------------------------------------

bool is_there(const Group *group) { return group->storage != nullptr; }

// `is_watched`: its copy has to be started yet, or its memory goes when that is done.
void begin_leaving(Body &body, std::int64_t storage, bool is_watched) {
    body.progress[static_cast<std::size_t>(storage)].is_leaving = true;
    body.leaving.push_back(storage);
    if (is_watched) {
        body.watched.push_back(storage);
    }
}

void end_leaving(Body &body, std::int64_t storage) {
    Progress &progress = body.progress[static_cast<std::size_t>(storage)];
    if (std::exchange(progress.is_leaving, false)) {
        progress.is_revived = false;
        body.leaving.erase(std::find(body.leaving.begin(), body.leaving.end(), storage));
        std::erase(body.watched, storage);
    }
}

// Start the copy of a storage that was saved now.
bool send_out(Follower *follower, std::int64_t storage) {
    Body &body = *follower->body;
    Progress &progress = body.progress[static_cast<std::size_t>(storage)];
    auto group = Ref<Group>::share(progress.group);
    const Terminal &terminal = body.storages[static_cast<std::size_t>(storage)];
    if (group->terms.action != Action::automatic) {
        return true; // a user's choice, which holds
    }
    group->is_planned = 1;
    group->terms.tier = static_cast<sk_tier>(terminal.tier);
    // A part, after its neighbours had their turn.
    bool is_part = group_is_partial(group.get());
    if (!progress.is_leaving) {
        begin_leaving(body, storage, is_part || !body.has_end[static_cast<std::size_t>(storage)]);
        follower->moved_bytes += group->nbytes;
    }
    bool is_due = group_state(group.get()) == SK_GROUP_RESIDENT && !is_part;
    return !is_due || copy_out(follower->mover, group.get()) >= 0;
}

bool release_copied(Mover *mover, Group *group) {
    return group_state(group) != SK_GROUP_CLEAN || !is_there(group) || release(mover, group);
}

// Give up the memory of a storage, waiting for its copy.
bool release_now(Follower *follower, Progress &progress) {
    if (progress.group != nullptr && is_recomputed(progress.group)) {
        forget_computed(follower->mover, progress.group); // until the next backward pass
        return true;
    }
    if (progress.group == nullptr || progress.is_back || progress.group->is_planned == 0) {
        return true;
    }
    auto group = Ref<Group>::share(progress.group);
    Mover *mover = follower->mover;
    if (group_state(group.get()) == SK_GROUP_RESIDENT && copy_out(mover, group.get()) < 0) {
        return false;
    }
    if (group_state(group.get()) == SK_GROUP_COPYING_OUT && finish_out(mover, group.get()) < 0) {
        return false;
    }
    return release_copied(mover, group.get());
}

// 1: it is gone, or will not go; 0: its copy is under way; -1: an exception is set.
int release_if_done(Follower *follower, const Progress &progress) {
    if (progress.group == nullptr || progress.is_back) {
        return 1;
    }
    auto group = Ref<Group>::share(progress.group);
    Mover *mover = follower->mover;
    if (group_state(group.get()) == SK_GROUP_RESIDENT) {
        int started = copy_out(mover, group.get());
        return started == 1 ? 0 : started < 0 ? -1 : 1; // the host is full: it stays
    }
    int is_done = poll_out(mover, group.get());
    if (is_done != 1) {
        return is_done;
    }
    return release_copied(mover, group.get()) ? 1 : -1;
}

// Whether something saves a storage once more.
bool is_saved_again(const Follower *follower, std::int64_t storage) {
    const Body &body = *follower->body;
    return follower->position <=
           static_cast<std::size_t>(body.storages[static_cast<std::size_t>(storage)].last_save);
}

// The storage that was sent out first; no_storage: none leaves.
std::int64_t next_to_leave(const Follower *follower) {
    const Body &body = *follower->body;
    auto at =
        std::find_if(body.leaving.begin(), body.leaving.end(), [follower](std::int64_t storage) {
            return !is_saved_again(follower, storage);
        });
    return at == body.leaving.end() ? no_storage : *at;
}

// Give up its memory, waiting for the copy. 1: done; 0: none leaves.
int release_next(Follower *follower) {
    std::int64_t storage = next_to_leave(follower);
    if (storage == no_storage) {
        return 0;
    }
    Body &body = *follower->body;
    end_leaving(body, storage);
    return release_now(follower, body.progress[static_cast<std::size_t>(storage)]) ? 1 : -1;
}

// The same if its copy is done.
int release_next_done(Follower *follower) {
    std::int64_t storage = next_to_leave(follower);
    if (storage == no_storage) {
        return 0;
    }
    Body &body = *follower->body;
    int is_done = release_if_done(follower, body.progress[static_cast<std::size_t>(storage)]);
    if (is_done == 1) {
        end_leaving(body, storage);
    }
    return is_done;
}

// 1: it is as watched for; 0: not yet; -1: an exception is set.
int attend(Follower *follower, std::int64_t storage) {
    Body &body = *follower->body;
    const Progress &progress = body.progress[static_cast<std::size_t>(storage)];
    if (progress.is_revived || !body.has_end[static_cast<std::size_t>(storage)]) {
        int is_done = release_if_done(follower, progress);
        if (is_done == 1) {
            end_leaving(body, storage);
        }
        return is_done;
    }
    auto group = Ref<Group>::share(progress.group);
    bool is_due = group && !progress.is_back && group_state(group.get()) == SK_GROUP_RESIDENT;
    return is_due && copy_out(follower->mover, group.get()) < 0 ? -1 : 1;
}

// Start the copies of parts; and release what no event is named for, as far as copies are done.
bool attend_watched(Follower *follower) {
    Body &body = *follower->body;
    for (std::size_t at = 0; at < body.watched.size();) {
        std::int64_t storage = body.watched[at];
        if (is_saved_again(follower, storage)) {
            at++;
            continue;
        }
        int is_done = attend(follower, storage);
        if (is_done != 1 || follower->is_on == 0) {
            return is_done >= 0;
        }
        std::erase(body.watched, storage);
    }
    return true;
}

// Let a storage have the group of the one that it continues; it may leave once more.
bool carry_on(Follower *follower, std::int64_t storage) {
    Body &body = *follower->body;
    const Terminal &terminal = body.storages[static_cast<std::size_t>(storage)];
    std::int64_t former = terminal.former;
    // One in between that autograd neither saved nor used has never got the group.
    while (former != no_storage &&
           body.progress[static_cast<std::size_t>(former)].group == nullptr) {
        former = body.storages[static_cast<std::size_t>(former)].former;
    }
    if (former == no_storage) {
        return true; // it is gone, or computed again
    }
    Progress &progress = body.progress[static_cast<std::size_t>(storage)];
    part(follower, progress);
    end_leaving(body, former); // what waits for its copy out waits under the former's number
    progress = std::exchange(body.progress[static_cast<std::size_t>(former)], Progress{});
    progress.group->followed = static_cast<std::uint32_t>(storage) + 1;
    if (terminal.treatment != Treatment::swap) {
        return true;
    }
    progress.is_back = false;
    return send_out(follower, storage);
}

// Do the releases that are due, and note the copies back that are.
bool take_dues(Follower *follower) {
    Body &body = *follower->body;
    while (follower->is_on != 0 && body.next_due < body.dues.size() &&
           body.dues[body.next_due].event < static_cast<std::int64_t>(follower->position)) {
        const Due &due = body.dues[body.next_due++];
        Progress &progress = body.progress[static_cast<std::size_t>(due.storage)];
        if (due.turn == Turn::comes) {
            body.coming.push_back(due.storage);
            continue;
        }
        if (due.turn == Turn::continues) {
            if (!carry_on(follower, due.storage)) {
                return false;
            }
            continue;
        }
        end_leaving(body, due.storage);
        if (!release_now(follower, progress)) {
            return false;
        }
    }
    return true;
}

// 1: it comes, or need not; 0: there is no room yet; -1: an exception is set.
int bring(Follower *follower, Progress &progress) {
    if (progress.group == nullptr || progress.is_back) {
        return 1;
    }
    progress.is_back = true;
    auto group = Ref<Group>::share(progress.group);
    if (is_there(group.get())) {
        return 1;
    }
    int started = bring_planned(follower->mover, group.get());
    progress.is_back = started != 0;
    return started;
}

// The same; what was copied by now makes room for it.
int bring_making_room(Follower *follower, std::int64_t storage) {
    int started = 0, is_released = 1;
    while (started == 0 && is_released == 1 && follower->is_on != 0) {
        started = bring(follower, follower->body->progress[static_cast<std::size_t>(storage)]);
        is_released = started == 0 ? release_next_done(follower) : 0;
    }
    return is_released < 0 ? -1 : started;
}

bool bring_due(Follower *follower) {
    Body &body = *follower->body;
    while (follower->is_on != 0 && !body.coming.empty()) {
        int started = bring_making_room(follower, body.coming.front());
        if (started != 1) {
            follower->refused += started == 0 ? 1 : 0;
            return started == 0;
        }
        if (!body.coming.empty()) { // nobody has ended it meanwhile
            body.coming.pop_front();
        }
    }
    return true;
}

bool has_due(const Follower *follower) {
    const Body &body = *follower->body;
    return body.next_due < body.dues.size() &&
           body.dues[body.next_due].event < static_cast<std::int64_t>(follower->position);
}

// What every event ends with.
bool end_event(Follower *follower) {
    const Body &body = *follower->body;
    if (follower->is_on == 0 ||
        (body.watched.empty() && body.coming.empty() && !has_due(follower))) {
        return true;
    }
    Locked lock(follower->mover);
    return lock && take_dues(follower) && attend_watched(follower) && bring_due(follower);
}

} // namespace

// ---- events -------------------------------------------------------------------------------------

bool is_following(const Mover *mover) {
    return mover->follower != nullptr && mover->follower->is_on != 0;
}

// Do with a group that was saved at an expected event what the plan says. As `follow_save`.
static int take_save(Follower *follower, const Expected &event, Group *group) {
    std::int64_t storage = event.storage;
    Locked lock(follower->mover);
    if (!lock || follower->is_on == 0) {
        return lock ? 0 : -1;
    }
    join(follower, storage, group);
    if (is_recomputed(group) && event.kind == Event::first_save) { // nobody has named its site
        group->tag = static_cast<std::uint32_t>(event.tag);
    }
    auto treatment = follower->body->storages[static_cast<std::size_t>(storage)].treatment;
    return treatment != Treatment::swap || send_out(follower, storage) ? 1 : -1;
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
    if (follower->body->has_carried) { // since the last use
        Locked lock(mover);
        if (!lock) {
            return false;
        }
        follower->body->carried.sweep();
        follower->body->has_carried = false;
    }
    if (!has_due(follower.get())) {
        return true;
    }
    Locked lock(mover);
    return lock && take_dues(follower.get());
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
        return; // another plan's by now: what nobody has goes
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

void follower_revived(Follower *follower, const Group *group) {
    if (follower == nullptr || group->followed == 0 || group->is_planned == 0) {
        return;
    }
    Progress &progress = follower->body->progress[group->followed - 1];
    if (progress.group == group && !progress.is_back && !progress.is_leaving) {
        progress.is_revived = true; // the event that was named for it may have been
        begin_leaving(*follower->body, static_cast<std::int64_t>(group->followed) - 1, true);
    }
}

bool follower_finds_site(const Follower *follower, Group *group) {
    if (follower == nullptr || follower->is_on == 0 ||
        follower->resting != PyThread_get_thread_ident()) {
        return false;
    }
    const Body &body = *follower->body;
    if (follower->position >= body.events.size() ||
        body.events[follower->position].kind != Event::first_save) {
        return false;
    }
    const Expected &event = body.events[follower->position];
    group->tag = static_cast<std::uint32_t>(event.tag);
    group->index = static_cast<std::uint32_t>(event.index);
    return true;
}

void follower_needed(Follower *follower, const Group *group) {
    if (follower != nullptr && group->followed != 0) {
        follower->body->progress[group->followed - 1].is_back = true;
    }
}

int follower_release_next(Follower *follower) {
    return follower->is_on == 0 ? 0 : release_next(follower);
}

void follower_end(Follower *follower) {
    follower->is_on = 0;
    part_all(follower);
}

} // namespace swapkit
