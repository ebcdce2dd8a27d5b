// mover.cpp - finding groups and moving them.
#include "moves/mover.hpp"

#include "memory/copy_owners.hpp"
#include "memory/reclaimable.hpp"
#include "memory/streams.hpp"
#include "moves/plan_cursor.hpp"
#include "recompute/recomputed.hpp"
#include "running/profiler_range.hpp"

#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

namespace swapkit {

// Next uses count down from here: the group that was saved last is needed first.
static constexpr std::uint64_t last_use = std::uint64_t{1} << 63;

// Vector instructions must see the same alignment in a part as in the whole storage.
static constexpr std::size_t part_alignment = 64;

// ---- indexes ------------------------------------------------------------------------------------

// Remove a group from the index: another storage may get its address.
static void forget_key(Mover *mover, Group *group) {
    auto found = mover->books->index.find(group->key);
    if (found != mover->books->index.end() && found->second == group) {
        mover->books->index.erase(found);
    }
}

// Of all movers. Guarded by the GIL; read without it.
static std::atomic<std::size_t> kept_count{0};

// Remove a group from those whose storage others kept.
static void forget_kept(Mover *mover, const Group *group) {
    auto [first, last] = mover->books->kept.equal_range(group->key.storage);
    for (auto each = first; each != last; ++each) { // few: one per version that was saved
        if (each->second == group) {
            mover->books->kept.erase(each);
            kept_count--;
            return;
        }
    }
}

void enroll(Mover *mover, Group *group) {
    Books &books = *mover->books;
    SWAPKIT_ASSERT(has_python() && group->storage != nullptr &&
                   group->storage == group->key.storage);
    if (group->serial == 0) {
        group->serial = ++books.serials;
    }
    forget_kept(mover, group);
    books.agenda.out.erase(group->serial);
    books.resident[group->serial] = group;
    if (!is_of_region(group)) { // the region finds its own groups
        books.index[group->key] = group;
    }
}

void enroll_again(Mover *mover, Group *group) {
    forget_key(mover, group);
    forget_kept(mover, group);
    group->key.storage = group->storage;
    agenda_remain(mover, group);
    enroll(mover, group);
}

void enroll_out(Mover *mover, Group *group) {
    if (group->is_held != 0) {
        return; // found by the program's storage
    }
    mover->books->resident.erase(group->serial);
    forget_kept(mover, group);
    if (group->weak == nullptr) {
        forget_key(mover, group);
    } else { // the weak reference reserves the storage's address
        mover->books->kept.emplace(group->key.storage, group);
        kept_count++;
    }
    agenda_note_out(mover, group);
}

void enroll_recomputed(Mover *mover, Group *group) {
    group->serial = ++mover->books->serials;
    if (!is_of_region(group)) {
        mover->books->index[group->key] = group;
    }
    mover->books->recomputed++;
}

Ref<Group> find_recomputed(Mover *mover, Key key) {
    auto found = mover->books->index.find(key);
    bool is_one = found != mover->books->index.end() && is_recomputed(found->second) &&
                  found->second->storage == nullptr;
    return Ref<Group>::share(is_one ? found->second : nullptr);
}

Ref<Group> find_group(Mover *mover, const c10::TensorImpl *tensor, Key key, Span span) {
    auto found = mover->books->index.find(key);
    if (found == mover->books->index.end()) {
        return Ref<Group>();
    }
    auto group = Ref<Group>::share(found->second);
    if (group->storage == nullptr) {
        if (!group_revive(group.get())) {
            return Ref<Group>();
        }
        enroll(mover, group.get());
        agenda_revived(mover, group.get());
    }
    return group_can_take(group.get(), tensor, span) ? std::move(group) : Ref<Group>();
}

void mover_forget(Mover *mover, Group *group) {
    SWAPKIT_ASSERT(has_python());
    forget_key(mover, group);
    forget_kept(mover, group);
    follower_forget(mover->follower, group);
    agenda_forget(mover, group);
    mover->books->resident.erase(group->serial);
}

void forget_copy(Mover *mover, Group *group) {
    agenda_remain(mover, group);
    mover->books->agenda.out.erase(group->serial);
    group_drop_copy(group);
}

static void note(Mover *mover, sk_ring_kind kind, std::size_t nbytes) {
    if (mover->pool != 0) {
        links.sk_pool_note(reinterpret_cast<sk_pool *>(mover->pool), kind, nbytes);
    }
}

// ---- transfers ----------------------------------------------------------------------------------

// The stream on which a group's bytes are valid.
static sk_stream *stream_of(const Mover *mover, const Group *group) {
    return stream_handle(mover->device(), group->stream);
}

// Whether a copy out failed only for lack of room (or the disk): the storage stays where it is.
static bool is_no_room(sk_status status) {
    return status == SK_OUT_OF_HOST_MEMORY || status == SK_OUT_OF_DISK || status == SK_DISK_FAILED;
}

// Create the native group for the copy out, if there is none yet.
static bool begin(Mover *mover, Group *group) {
    if (group->native != nullptr) {
        return true;
    }
    group_measure(group);
    std::size_t part = 0, nbytes = group->nbytes;
    if (group_is_partial(group)) {
        part = group->cover.begin_bytes / part_alignment * part_alignment;
        nbytes = group->cover.end_bytes - part;
    }
    sk_tier tier = mover->has_disk != 0 ? group->terms.tier : SK_TIER_ANY;
    if (raises(links.sk_group_create(mover->sched, nbytes, tier, &group->native))) {
        return false;
    }
    links.sk_group_label(group->native, group->tag);
    if (group->is_held != 0) {
        lend_file(group);
    }
    group->part_bytes = part;
    group->nbytes = nbytes;
    group->state_at = links.sk_group_state_at(group->native);
    return true;
}

int copy_out(Mover *mover, Group *group) {
    if (!group_has_storage(group)) {
        return 0;
    }
    bool is_first = group->native == nullptr;
    if (!begin(mover, group)) {
        return -1;
    }
    description_free(group->description); // an operator may have changed it since the last copy
    group->description = description_of(group->storage);
    ProfilerRange range(RangeName::swap_out);
    c10::StorageImpl *storage = group->storage;
    c10::StorageImpl *owner = swapkit_owner_new(storage);
    group->copied_from = memory_of(storage);
    const char *bytes =
        static_cast<const char *>(address_of(owner)) + group->part_bytes - group->shift_bytes;
    sk_status status = SK_OK;
    {
        WithoutPython others;
        status = links.sk_group_copy_out(group->native, bytes, owner, last_use - group->serial,
                                         stream_of(mover, group));
    }
    if (status != SK_OK) {
        if (is_no_room(status)) {
            mover->host_is_full = 1;
            if (is_first) {
                group_forget_copy(group);
            }
        } else {
            (void)raises(status);
        }
        swapkit_storage_drop(owner);
        return is_no_room(status) ? 0 : -1;
    }
    if (group->standby == Standby::spare) {
        recipe_leave(group); // its operands need not be kept any more
    }
    note(mover, SK_RING_COPY_OUT, group->nbytes);
    return 1;
}

int poll_out(Mover *, Group *group) {
    if (group_state(group) != SK_GROUP_COPYING_OUT) {
        return 1;
    }
    sk_status status = links.sk_group_finish_out(group->native, nullptr, true);
    if (status == SK_NOT_READY) {
        return 0;
    }
    return is_no_room(status) || !raises(status) ? 1 : -1;
}

// Wait for a transfer, and add the seconds to the group's site.
static sk_status wait_for(Mover *mover, Group *group, decltype(&sk_group_finish_out) finish) {
    sk_status status = SK_OK;
    auto started = std::chrono::steady_clock::now();
    {
        WithoutPython others;
        status = finish(group->native, stream_of(mover, group), false);
    }
    std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    mover->waits++;
    mover->books->stalls[{group->tag, group->index}] += taken.count();
    return status;
}

int finish_out(Mover *mover, Group *group) {
    sk_status status = SK_OK;
    if (group->native == nullptr) {
        return 0;
    }
    if (links.sk_group_has_copy(group->native)) { // whole: only its cleanup is waited for
        WithoutPython others;
        status = links.sk_group_finish_out(group->native, stream_of(mover, group), false);
    } else {
        status = wait_for(mover, group, links.sk_group_finish_out);
    }
    if (is_no_room(status)) {
        return 0;
    }
    return raises(status) ? -1 : 1;
}

bool finish_in(Mover *mover, Group *group) {
    if (group_state(group) != SK_GROUP_COPYING_IN) {
        return true;
    }
    sk_status status = links.sk_group_finish_in(group->native, nullptr, true);
    if (status == SK_NOT_READY) {
        ProfilerRange range(RangeName::swap_in_wait);
        status = wait_for(mover, group, links.sk_group_finish_in);
    }
    if (group_state(group) == SK_GROUP_OUT) { // the copy failed
        if (group->storage != nullptr) {
            swapkit_storage_drop(std::exchange(group->storage, nullptr));
        }
        enroll_out(mover, group);
    }
    return !raises(status);
}

// Return the place of a copy back in the queue. While a plan lets weights come, as they start: one
// whose memory is free later would keep others waiting. What an operator waits for is before those
// that have started since the last use of a weight.
static std::uint64_t next_use_of(const Mover *mover, const Group *group, bool tentative) {
    const HeldOrder &held = mover->books->held;
    return held.plan.empty() ? last_use - group->serial : 2 * held.clock + (tentative ? 1 : 0);
}

int start_in(Mover *mover, Group *group, bool tentative) {
    SWAPKIT_ASSERT(group->native != nullptr);
    c10::StorageImpl *storage = nullptr;
    bool previous = tentative && links.sk_tentative_set(true);
    try {
        WithoutPython others;
        storage = storage_new(group->nbytes, mover->device());
    } catch (const std::exception &) {
        if (!tentative) {
            raise_current();
        }
    }
    if (tentative) {
        (void)links.sk_tentative_set(previous);
    }
    if (storage == nullptr) {
        return tentative ? 0 : -1;
    }
    describe(storage, group->description);
    ProfilerRange range(RangeName::swap_in);
    group_restore(group, storage);
    group->stream = current_stream(mover->device()); // it was allocated there
    swapkit_storage_hold(storage);                   // for the copy
    sk_status status = SK_OK;
    {
        WithoutPython others;
        status =
            links.sk_group_copy_in(group->native, storage->mutable_data(), storage,
                                   next_use_of(mover, group, tentative), stream_of(mover, group));
    }
    if (raises(status)) {
        swapkit_storage_drop(storage);
        swapkit_storage_drop(std::exchange(group->storage, nullptr));
        return -1;
    }
    note(mover, SK_RING_COPY_IN, group->nbytes);
    return 1;
}

int make_reclaimable(Mover *mover, Group *group) {
    if (!group_has_storage(group) || is_known_to_python(group->storage)) {
        return 0;
    }
    if (!begin(mover, group)) {
        return -1;
    }
    c10::StorageImpl *storage = group->storage;
    note_use(storage, mover->device(), group->stream);
    reclaimable_expect(storage, group->native, mover->device());
    int started = -1;
    try {
        started = copy_out(mover, group);
    } catch (...) {
        reclaimable_forget(storage);
        throw;
    }
    if (started != 1) {
        reclaimable_forget(storage);
        return started;
    }
    group->is_reclaimable = 1;
    group_strip(group);
    enroll_out(mover, group);
    return 1;
}

// Make a reclaimable group resident again if its storage is still there, or else evict it.
static bool end_reclaimable(Mover *mover, Group *group) {
    if (group->is_reclaimable == 0) {
        return true;
    }
    if (group_revive(group)) { // before the list drops the storage
        enroll_again(mover, group);
        return true;
    }
    group->is_reclaimable = 0;
    if (group_state(group) == SK_GROUP_COPYING_OUT && // done: a rescue takes storages only then
        poll_out(mover, group) < 0) {
        return false;
    }
    return !raises(links.sk_group_evict(group->native));
}

// Make sure that the copy has the bytes of the group's storage. The program may have exchanged the
// memory in the storage (`share_memory_`, `resize_`), which no version counts. If so, copy it
// again. 0: there is no room for the copy; -1: an exception is set.
static int make_copy_sound(Mover *mover, Group *group) {
    if (group->storage == nullptr || memory_of(group->storage) == group->copied_from) {
        return 1;
    }
    group_forget_copy(group);
    int is_copied = copy_out(mover, group);
    return is_copied == 1 ? finish_out(mover, group) : is_copied;
}

bool release(Mover *mover, Group *group) {
    SWAPKIT_ASSERT(has_python() && group->native != nullptr);
    int is_sound = make_copy_sound(mover, group);
    if (is_sound != 1) {
        agenda_remain(mover, group); // it stays
        return is_sound == 0;
    }
    if (raises(links.sk_group_evict(group->native))) {
        return false;
    }
    if (group->storage != nullptr) {
        note_use(group->storage, mover->device(), group->stream); // that stream waits for the copy
    }
    reclaimable_sweep(); // otherwise the copy's reference would keep the memory alive
    group_strip(group);
    agenda_remain(mover, group);
    enroll_out(mover, group);
    return true;
}

// ---- coming back --------------------------------------------------------------------------------

int has_room(Mover *mover, std::size_t nbytes, bool spares) {
    if (mover->pool != 0) {
        return links.sk_pool_has_room(reinterpret_cast<sk_pool *>(mover->pool), nbytes, spares);
    }
    return is_true(call_method<"has_room">(mover->policy, nbytes));
}

// As `bring_early`, and `has_room`.
static int bring_if_room(Mover *mover, Group *group, bool spares) {
    if (!end_reclaimable(mover, group)) {
        return -1;
    }
    if (group->storage == nullptr && !group_revive(group)) {
        int started = has_room(mover, group->nbytes, spares);
        if (started == 1) {
            started = start_in(mover, group, true);
        }
        if (started != 1) {
            return started;
        }
    }
    enroll_again(mover, group);
    return 1;
}

int bring_early(Mover *mover, Group *group) { return bring_if_room(mover, group, true); }

int bring_planned(Mover *mover, Group *group) { return bring_if_room(mover, group, false); }

int recompute_early(Mover *mover, Group *group) {
    if (group->storage != nullptr || !is_recomputed(group)) {
        return 1;
    }
    if (current_stream(mover->device()) != group->stream) {
        return 1; // its operands are in the order of that stream, as its use will be
    }
    int started = has_room(mover, group->nbytes, false);
    auto own = Ref<Mover>::share(mover);
    const Meanwhile early(mover->books->is_early, true);
    return started == 1 && !compute_again(mover, group) ? -1 : started;
}

bool bring_back(Mover *mover, Group *group) {
    SWAPKIT_ASSERT(has_python());
    if (!end_reclaimable(mover, group)) {
        return false;
    }
    if (is_recomputed(group)) {
        if (!compute_again(mover, group)) {
            return false;
        }
    } else if (group_state(group) == SK_GROUP_OUT) {
        if (!group_revive(group) && start_in(mover, group, false) < 0) {
            return false;
        }
        enroll_again(mover, group);
    }
    c10::StorageImpl *storage = group->storage;
    SWAPKIT_ASSERT(storage != nullptr);
    swapkit_storage_hold(storage); // no rescue may drop it meanwhile
    bool is_back = agenda_bring_before(mover, group->serial) && finish_in(mover, group);
    swapkit_storage_drop(storage);
    return is_back;
}

// ---- announced kernels --------------------------------------------------------------------------

// Guarded by the GIL. Never freed.
static auto &movers = *new std::vector<Mover *>;

void mover_join(Mover *mover) { movers.push_back(mover); }

void mover_part(Mover *mover) { std::erase(movers, mover); }

// References to all movers: while one waits for a lock, others may come and go.
static std::vector<Ref<Mover>> all_movers() {
    SWAPKIT_ASSERT(has_python());
    std::vector<Ref<Mover>> found;
    found.reserve(movers.size());
    for (Mover *mover : movers) {
        found.push_back(Ref<Mover>::share(mover));
    }
    return found;
}

bool is_any_kept() { return kept_count.load(std::memory_order_relaxed) != 0; }

bool revive_kept(const c10::StorageImpl *storage) {
    for (const Ref<Mover> &mover : all_movers()) {
        if (mover->books->kept.count(storage) == 0) {
            continue;
        }
        Locked lock(mover.get());
        if (!lock) {
            return false;
        }
        std::vector<Ref<Group>> groups;
        auto [first, last] = mover->books->kept.equal_range(storage);
        for (auto each = first; each != last; ++each) {
            groups.push_back(Ref<Group>::share(each->second));
        }
        for (const Ref<Group> &group : groups) {
            if (group->storage == nullptr && group_revive(group.get())) {
                enroll(mover.get(), group.get());
                agenda_revived(mover.get(), group.get());
            }
        }
    }
    return true;
}

// Return whether an address is in a storage's memory.
static bool holds_address(const c10::StorageImpl *storage, const void *address) {
    const auto *begin = static_cast<const char *>(address_of(storage));
    const auto *asked = static_cast<const char *>(address);
    return begin != nullptr && begin <= asked && asked < begin + storage->nbytes();
}

// The storage at an address among the groups of one mover, whose lock is held. As `storage_at`.
static bool storage_of_mover(Mover *mover, const void *address, c10::StorageImpl **out) {
    for (auto [serial, found] : mover->books->resident) {
        if (holds_address(found->storage, address)) {
            auto group = Ref<Group>::share(found);
            swapkit_storage_hold(group->storage);
            *out = group->storage;
            return finish_in(mover, group.get());
        }
    }
    std::vector<c10::StorageImpl *> others; // dropping the last reference may change the index
    for (auto [key, found] : mover->books->kept) {
        c10::StorageImpl *kept =
            found->weak == nullptr ? nullptr : c10::raw::weak_intrusive_ptr::lock(found->weak);
        if (kept != nullptr && holds_address(kept, address)) {
            *out = kept;
            break;
        }
        if (kept != nullptr) {
            others.push_back(kept);
        }
    }
    for (c10::StorageImpl *each : others) {
        swapkit_storage_drop(each);
    }
    return true;
}

bool storage_at(const void *address, c10::StorageImpl **out) {
    *out = nullptr;
    for (const Ref<Mover> &mover : all_movers()) {
        Locked lock(mover.get());
        if (!lock || !storage_of_mover(mover.get(), address, out)) {
            return false;
        }
        if (*out != nullptr) {
            return true;
        }
    }
    return true;
}

} // namespace swapkit
