// held.cpp - when held storages leave and come back.
#include "held/table.hpp"

#include "memory/copy_owners.hpp"
#include "memory/streams.hpp"
#include "saved/pack_hooks.hpp"

#include <algorithm>
#include <memory>
#include <utility>

namespace swapkit {

namespace {

// Used soon: within this part of a step's uses.
constexpr std::size_t soon = 16;
// This part of a mover's watermark is brought ahead.
constexpr std::size_t ahead = 4;

struct Keys : c10::TensorImpl {
    static c10::DispatchKeySet &of(c10::TensorImpl &impl) { return impl.*(&Keys::key_set_); }
};

// ---- leaving ------------------------------------------------------------------------------------

void stay(Held *held) {
    std::lock_guard guard(held_lock);
    set_here(held, true);
    seal(held, held->pins == 0);
}

} // namespace

int start_out(Mover *mover, Held *held, const Streams &streams, bool is_written) {
    Group *group = held->group;
    for (std::int64_t stream : streams) { // the memory is given up in the order of one stream
        if (stream != group->stream) {
            order_streams(mover->device(), stream, group->stream);
        }
    }
    if (group->native != nullptr && (is_written || group->storage->nbytes() != group->nbytes)) {
        group_forget_copy(group);
    }
    if (group->native == nullptr) { // it may have another size now
        group->is_moved = 0;
        group_measure(group);
        group->cover = {.begin_bytes = 0, .end_bytes = group->nbytes};
    }
    return group_state(group) == SK_GROUP_RESIDENT ? copy_out(mover, group) : 1;
}

namespace {

// Start copying a storage out, if no operator runs with it. 0: it stays; -1: an exception is set.
int begin_leaving(Mover *mover, Held *held) {
    bool is_written = false, is_new = false;
    Streams streams;
    {
        std::lock_guard guard(held_lock);
        if (!held->is_here || held->pins != 0 || !held->is_sealed) {
            return 0;
        }
        set_here(held, false); // an operator that comes now waits for the runtime's lock
        is_written = std::exchange(held->is_written, false);
        is_new = std::exchange(held->is_new, false);
        streams = std::exchange(held->streams, {});
    }
    int is_copied = start_out(mover, held, streams, is_written);
    if (is_copied != 1) {
        stay(held);
    } else if (is_new) {
        mover->books->held.behind_bytes += held->group->nbytes;
    }
    return is_copied;
}

// Wait for the copy, and give the memory up. 0: it stays, there is no room for a copy.
int finish_leaving(Mover *mover, Held *held) {
    Group *group = held->group;
    int is_done = group_state(group) == SK_GROUP_COPYING_OUT ? finish_out(mover, group) : 1;
    if (is_done == 1 && release(mover, group) && group->storage == nullptr) {
        return 1;
    }
    stay(held);
    return PyErr_Occurred() != nullptr ? -1 : 0;
}

} // namespace

int let_go_now(Mover *mover, Held *held) {
    if (poll_out(mover, held->group) < 0) {
        return -1;
    }
    {
        std::lock_guard guard(held_lock);
        if (held->is_written || group_state(held->group) != SK_GROUP_CLEAN) {
            return 0;
        }
    }
    return let_go(mover, held);
}

namespace {

// ---- coming back --------------------------------------------------------------------------------

// Give the program's storage the memory that a copy has filled. Waits for the copy.
bool arrive(Mover *mover, Held *held) {
    if (!finish_in(mover, held->group)) {
        return false;
    }
    group_arrive(held->group);
    stay(held);
    return true;
}

} // namespace

int let_go(Mover *mover, Held *held) {
    int is_leaving = begin_leaving(mover, held);
    return is_leaving == 1 ? finish_leaving(mover, held) : is_leaving;
}

bool start_held(Mover *mover, Held *held, bool is_tentative, int *started) {
    held->group->serial = ++mover->books->serials; // the copy that is needed soonest
    std::uint32_t former = links.sk_tag_set(mover->held_tag);
    *started = start_in(mover, held->group, is_tentative);
    (void)links.sk_tag_set(former);
    return *started >= 0;
}

namespace {

// Make room for one that is used next in `distance` uses, without waiting.
int make_room(Mover *mover, const Held *coming, std::size_t distance) {
    int is_room = has_room(mover, coming->group->nbytes, true);
    if (is_room != 0) {
        return is_room;
    }
    Farthest farthest(mover, coming->group->nbytes, distance, false);
    while (Held *each = farthest.next()) {
        int is_gone = let_go_now(mover, each);
        is_room = is_gone == 1 ? has_room(mover, coming->group->nbytes, true) : is_gone;
        if (is_room != 0) {
            return is_room;
        }
    }
    return 0;
}

// Return the storage that is used next after so many uses; null: none is known. An operator
// elsewhere may begin the next order meanwhile.
Held *find_next(const HeldOrder &order, std::size_t distance) {
    std::lock_guard guard(held_lock);
    std::size_t size = order.last.size();
    return distance < size ? order.last[(order.at + distance) % size] : nullptr;
}

// Start to bring what is used next, as far as there is room.
bool look_ahead(Mover *mover) {
    if (!mover->books->held.plan.empty()) {
        return true;
    }
    std::size_t coming_bytes = 0;
    for (std::size_t i = 1; coming_bytes < mover->watermark_bytes / ahead; i++) {
        Held *held = find_next(mover->books->held, i);
        if (held == nullptr) {
            break;
        }
        if (is_here(held)) {
            continue;
        }
        int started = 1;
        if (group_state(held->group) == SK_GROUP_OUT) {
            started = make_room(mover, held, i);
            if (started < 0 || (started == 1 && !start_held(mover, held, true, &started))) {
                return false;
            }
        }
        if (started == 0) {
            break;
        }
        coming_bytes += held->group->nbytes;
    }
    return true;
}

// Let this thread's stream use a storage that has come, or comes, on another one.
void follow_stream(const Mover *mover, Held *held) {
    if (!has_streams(mover->device())) {
        return;
    }
    Group *group = held->group;
    std::int64_t here = current_stream(mover->device());
    if (here != group->stream) {
        order_streams(mover->device(), group->stream, here);
        note_use(group->storage, mover->device(), here);
    }
    std::lock_guard guard(held_lock);
    held->streams.push_back(here);
}

} // namespace

bool begin_bringing(Held *held) {
    auto mover = Ref<Mover>::share(held->group->mover);
    Locked lock(mover.get());
    int started = 1;
    return lock && (is_here(held) || group_state(held->group) != SK_GROUP_OUT ||
                    start_held(mover.get(), held, false, &started));
}

bool bring_held(Held *held) {
    auto mover = Ref<Mover>::share(held->group->mover);
    Locked lock(mover.get());
    if (!lock) {
        return false;
    }
    if (!is_here(held)) {
        const auto waits = mover->waits;
        if (!begin_bringing(held) || !arrive(mover.get(), held)) {
            return false;
        }
        mover->books->held.late += mover->waits != waits ? 1 : 0;
    }
    follow_stream(mover.get(), held);
    return true;
}

bool bring_next(Held *held) {
    auto mover = Ref<Mover>::share(held->group->mover);
    Locked lock(mover.get());
    return lock &&
           (mover->books->held.is_over || (look_ahead(mover.get()) && copy_behind(mover.get())));
}

// ---- which storages are held --------------------------------------------------------------------

// Return whether the program holds a storage no more.
static bool is_dead(const Held *held) {
    const Group *group = held->group;
    if (group_state(group) == SK_GROUP_COPYING_IN) {
        return false;
    }
    return group->weak != nullptr ? c10::raw::weak_intrusive_ptr::use_count(group->weak) == 0
                                  : count_holders(group->storage) == 1;
}

bool forget_held(Mover *mover, Held *held) {
    std::unique_ptr<Held> owned;
    {
        std::lock_guard guard(held_lock);
        if (held->pins != 0) {
            return false;
        }
        if (is_dead(held)) {
            forget_file(held->group->key.storage);
        }
        seal(held, false);
        HeldOrder &order = mover->books->held;
        std::erase(order.all, held);
        std::erase(order.idle, held);
        std::erase(order.now, held);
        forget_plan(order);
        std::erase(order.written, held);
        std::erase(order.copying, held);
        std::erase_if(order.going, [held](const auto &each) { return each.first == held; });
        if (std::erase(order.last, held) != 0) {
            for (Held *each : order.last) {
                each->uses.clear();
            }
            order.now = std::exchange(order.last, {}); // the places of the others have changed
            begin_order(order);
        }
        auto found = held_table.find(held->group->key.storage);
        owned = std::move(found->second);
        held_table.erase(found);
    }
    Py_DECREF(owned->group);
    return true;
}

namespace {

// Forget dead storages; return the bytes that this frees.
std::size_t sweep(Mover *mover) {
    std::size_t freed = 0;
    for (Held *each : std::vector<Held *>(mover->books->held.all)) {
        std::size_t nbytes = each->group->storage != nullptr ? each->group->nbytes : 0;
        if (is_dead(each) && forget_held(mover, each)) {
            freed += nbytes;
        }
    }
    return freed;
}

} // namespace

// ---- for the session ----------------------------------------------------------------------------

namespace {

// Take a storage from the mover of a session that has ended. 0: it may not go to another one; -1:
// an exception is set.
int take_over(Held *held) {
    auto former = Ref<Mover>::share(held->group->mover);
    if (!former->books->held.is_over) {
        return 0;
    }
    if (!bring_held(held)) {
        return -1;
    }
    return forget_held(former.get(), held) ? 1 : 0;
}

// Make the entry of a storage. 0: its memory may be in use now; -1: an exception is set.
int held_new(Mover *mover, c10::StorageImpl *storage, const Terms &terms) {
    auto group = Ref<Group>::steal(group_new(mover, terms, {.storage = storage, .version = 0}));
    if (!group) {
        return -1;
    }
    group->is_held = 1;
    group->stream = current_stream(mover->device());
    auto made = std::make_unique<Held>();
    made->group = group.get();
    std::lock_guard guard(held_lock);
    if (watched_running.count(storage) != 0 || watched_exposed.count(storage) != 0) {
        return 0;
    }
    mover->books->held.all.push_back(made.get());
    mover->books->held.idle.push_back(made.get());
    held_table.emplace(storage, std::move(made));
    group.release();
    return 1;
}

// Return whether more than Python may hold a tensor: others hold what was exported to them
// (DLPack), and read its memory. The graph holds tensors that require gradients; those are not
// exported themselves.
bool is_exported(c10::TensorImpl *impl) {
    return !impl->requires_grad() && c10::raw::intrusive_ptr::use_count(impl) > 1;
}

} // namespace

int watch(Mover *mover, PyObject *tensor, std::size_t min_bytes) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return -1;
    }
    c10::StorageImpl *storage = plain_storage(*impl, std::max<std::size_t>(min_bytes, 1));
    if (storage == nullptr || impl->device() != mover->device()) {
        return 0;
    }
    Held *held = find_held(storage);
    int is_free = held == nullptr || held->group->mover == mover ? 1 : take_over(held);
    if (is_free != 1) {
        return is_free;
    }
    if (find_held(storage) == nullptr && !is_counted(mover, *storage)) {
        return 0;
    }
    if (!trap_register()) {
        return -1;
    }
    std::lock_guard guard(held_lock);
    Keys::of(*impl) = impl->key_set().add(held_key());
    return 1;
}

bool expose(Mover *, PyObject *tensor) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return false;
    }
    if (is_trapped(*impl) && impl->has_storage()) {
        std::lock_guard guard(held_lock);
        watched_exposed.insert(impl->unsafe_storage().unsafeGetStorageImpl());
    }
    return true;
}

int hold(Mover *mover, PyObject *tensor, PyObject *placement) {
    c10::TensorImpl *impl = nullptr;
    Terms terms = {};
    if (!impl_of(tensor, &impl) || !terms_read(placement, &terms)) {
        return -1;
    }
    Ref<> own = Ref<>::steal(terms.placement); // `group_new` takes its own
    c10::StorageImpl *storage =
        is_trapped(*impl) ? plain_storage(*impl, std::max<std::size_t>(terms.min_bytes, 1))
                          : nullptr;
    if (storage == nullptr || impl->device() != mover->device() || is_exported(impl)) {
        return 0;
    }
    Held *held = find_held(storage);
    if (held != nullptr && held->group->mover != mover) {
        return 0;
    }
    int is_own = held != nullptr ? 1 : held_new(mover, storage, terms);
    if (is_own == 1) {
        std::lock_guard guard(held_lock);
        auto &known = find_held(storage)->tensors;
        if (std::find(known.begin(), known.end(), impl) == known.end()) {
            known.push_back(impl);
        }
    }
    return is_own;
}

namespace {

// Return whether nobody else holds a storage that is here. Torch makes a storage fixed in size if a
// numpy array has its memory. The lock and the GIL are held.
bool is_ours(const Held *held) {
    c10::StorageImpl *storage = held->group->storage;
    auto found = held_aliases.find(storage);
    std::size_t known =
        1 + held->tensors.size() + (found == held_aliases.end() ? 0 : found->second.size());
    for (const c10::TensorImpl *each : held->tensors) {
        known -= found != held_aliases.end() && found->second.count(each) != 0 ? 1 : 0;
    }
    return storage->resizable() && count_holders(storage) == known;
}

} // namespace

void held_begin(Mover *mover) {
    for (Held *each : std::vector<Held *>(mover->books->held.all)) {
        {
            std::lock_guard guard(held_lock);
            each->is_sealed =
                each->is_sealed || !each->is_here || (!each->is_kept && is_ours(each));
            seal(each, each->pins == 0);
        }
        if (!each->is_sealed && !each->is_kept) {
            (void)forget_held(mover, each);
        }
    }
}

bool unhold(Mover *, PyObject *tensor) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return false;
    }
    std::lock_guard guard(held_lock);
    if (is_trapped(*impl) &&
        (!impl->has_storage() ||
         find_held(impl->unsafe_storage().unsafeGetStorageImpl()) == nullptr)) {
        Keys::of(*impl) = impl->key_set().remove(held_key());
    }
    return true;
}

namespace {

// Return how many of the next uses are soon.
std::size_t count_soon(const HeldOrder &order) {
    std::lock_guard guard(held_lock);
    return order.last.size() / soon;
}

// Start to let storages go, of so many bytes; return those that go. An exception may be set.
std::vector<Held *> begin_freeing(Mover *mover, std::size_t needed_bytes, bool spares) {
    std::vector<Held *> leaving;
    std::size_t leaving_bytes = 0;
    HeldOrder &order = mover->books->held;
    Farthest farthest(mover, needed_bytes, spares ? count_soon(order) : 0, !spares);
    while (leaving_bytes < needed_bytes) {
        Held *going = take_going(order);
        Held *each = going != nullptr ? going : farthest.next();
        if (each == nullptr ||
            (group_state(each->group) == SK_GROUP_COPYING_IN && !arrive(mover, each))) {
            break;
        }
        int is_leaving = begin_leaving(mover, each);
        if (is_leaving < 0) {
            break;
        }
        if (is_leaving == 1) {
            leaving.push_back(each);
            leaving_bytes += each->group->nbytes;
        }
    }
    return leaving;
}

} // namespace

Ref<> held_free(Mover *mover, unsigned long long needed_bytes, bool spares) {
    std::size_t freed = sweep(mover);
    std::vector<Held *> leaving;
    if (freed < needed_bytes) {
        leaving = begin_freeing(mover, needed_bytes - freed, spares);
    }
    bool has_failed = PyErr_Occurred() != nullptr;
    for (Held *each : leaving) {
        PutAside first;
        int is_done = finish_leaving(mover, each);
        has_failed = has_failed || is_done < 0;
        freed += is_done == 1 ? each->group->nbytes : 0;
        PyErr_Clear();
    }
    if (has_failed && PyErr_Occurred() == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "swapkit: the copy of a weight has failed");
    }
    return has_failed ? Ref<>() : for_python(freed);
}

bool held_end_step(Mover *mover) {
    (void)sweep(mover);
    HeldOrder &order = mover->books->held;
    {
        std::lock_guard guard(held_lock);
        if (!order.now.empty()) {
            begin_order(order);
            note_left(order);
        }
        if (!order.plan.empty()) { // the first ones may come while the optimizer works
            const std::vector<Held *> &first = order.plan.front().comes;
            order.coming.insert(order.coming.end(), first.begin(), first.end());
        }
    }
    return leave_planned(mover) && come_planned(mover);
}

bool held_end(Mover *mover) {
    HeldOrder &order = mover->books->held;
    order.is_over = true;
    {
        std::lock_guard guard(held_lock);
        forget_plan(order);
        begin_order(order);
        begin_order(order); // no order any more: each storage that is forgotten would change it
    }
    (void)sweep(mover);
    {
        std::lock_guard guard(held_lock);
        watched_exposed.clear();
    }
    for (Held *each : std::vector<Held *>(order.all)) {
        int started = 1;
        if (group_state(each->group) == SK_GROUP_OUT && !start_held(mover, each, true, &started)) {
            return false;
        }
        if (started == 0) {
            continue;
        }
        if (!is_here(each) && !arrive(mover, each)) {
            return false;
        }
        (void)forget_held(mover, each);
    }
    return true;
}

} // namespace swapkit
