// held.cpp - when held storages leave and come back.
#include "held/held.hpp"

#include "memory/copy_owners.hpp"
#include "moves/mover.hpp"
#include "saved/pack_hooks.hpp"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <unordered_map>
#include <utility>

namespace swapkit {

struct Held {
    Group *group;                           // owned
    std::vector<c10::TensorImpl *> tensors; // weak: the program's own
    std::vector<std::size_t> uses;          // where it is in the last step's order
    std::size_t handles = 0;                // of saved tensors, each with an alias
    std::size_t pins = 0;                   // operators that run with it
    std::uint64_t last_use = 0;
    bool is_here = true;
    bool is_written = false; // since it was copied
};

namespace {

auto &held_lock = *new std::mutex;
// By storage; the group keeps its address from others. Never freed, as in `weights.cpp`.
auto &table = *new std::unordered_map<const c10::StorageImpl *, std::unique_ptr<Held>>;

[[maybe_unused]] const int held_at_fork = pthread_atfork(
    [] { held_lock.lock(); }, [] { held_lock.unlock(); }, [] { held_lock.unlock(); });

// The order is searched so far for a use that comes out of turn.
constexpr std::size_t out_of_turn = 64;
// Used soon: within this part of a step's uses.
constexpr std::size_t soon = 16;
// Without steps, so many uses in a row are taken for one.
constexpr std::size_t most_uses = 1 << 16;
// This part of a mover's watermark is brought ahead.
constexpr std::size_t ahead = 4;
constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

struct Access : c10::TensorImpl {
    static c10::DispatchKeySet &keys(c10::TensorImpl &impl) { return impl.*(&Access::key_set_); }
};

Held *find(const c10::StorageImpl *storage) {
    auto found = table.find(storage);
    return found == table.end() ? nullptr : found->second.get();
}

HeldOrder &order_of(const Held *held) { return held->group->mover->books->held; }

// ---- the order of uses --------------------------------------------------------------------------

void begin_order(HeldOrder &order) {
    for (Held *each : order.last) {
        each->uses.clear();
    }
    order.last = std::exchange(order.now, {});
    for (std::size_t i = 0; i < order.last.size(); i++) {
        order.last[i]->uses.push_back(i);
    }
    order.at = order.last.empty() ? 0 : order.last.size() - 1;
}

void note_use(Held *held) {
    HeldOrder &order = order_of(held);
    held->last_use = ++order.clock;
    if (!order.now.empty() && order.now.back() == held) {
        return;
    }
    if (order.now.size() == most_uses) {
        begin_order(order);
    }
    order.now.push_back(held);
    std::size_t size = order.last.size();
    for (std::size_t i = 0; i < std::min(size, out_of_turn); i++) {
        std::size_t at = (order.at + i) % size;
        if (order.last[at] == held) {
            order.at = at;
            return;
        }
    }
}

// Return in how many uses a storage is used next; `never`: not known.
std::size_t next_use(const HeldOrder &order, const Held *held) {
    if (held->uses.empty()) {
        return never;
    }
    auto next = std::upper_bound(held->uses.begin(), held->uses.end(), order.at);
    return next != held->uses.end() ? *next - order.at
                                    : held->uses.front() + order.last.size() - order.at;
}

// ---- leaving ------------------------------------------------------------------------------------

// Return how many references to a storage are those of its group, its tensors and handles.
std::size_t count_known(const Held *held, const c10::StorageImpl *storage) {
    std::size_t known = 1;
    for (c10::TensorImpl *each : held->tensors) {
        c10::TensorImpl *tensor = c10::raw::weak_intrusive_ptr::lock(each);
        if (tensor != nullptr) {
            known +=
                tensor->has_storage() && tensor->unsafe_storage().unsafeGetStorageImpl() == storage
                    ? 1
                    : 0;
            c10::raw::intrusive_ptr::decref(tensor);
        }
    }
    return known;
}

// Return whether nobody else holds a storage that is here. Torch makes a storage fixed in size if a
// numpy array has its memory. The lock is held.
bool is_ours(const Held *held, std::size_t known) {
    c10::StorageImpl *storage = held->group->storage;
    return storage->resizable() && count_holders(storage) == known + held->handles;
}

bool is_here(const Held *held) {
    std::lock_guard guard(held_lock);
    return held->is_here;
}

void stay(Held *held) {
    std::lock_guard guard(held_lock);
    held->is_here = true;
}

// Start copying a storage out, if nothing else holds it. 0: it stays; -1: an exception is set.
int begin_leaving(Mover *mover, Held *held) {
    Group *group = held->group;
    std::size_t known = count_known(held, group->storage);
    bool is_written = false;
    {
        std::lock_guard guard(held_lock);
        if (!held->is_here || held->pins != 0 || !is_ours(held, known)) {
            return 0;
        }
        held->is_here = false; // an operator that comes now waits for the runtime's lock
        is_written = std::exchange(held->is_written, false);
    }
    if (is_written && group->native != nullptr) {
        group_forget_copy(group);
    }
    int is_copied = group_state(group) == SK_GROUP_RESIDENT ? copy_out(mover, group) : 1;
    if (is_copied != 1) {
        stay(held);
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

// Let a storage go whose copy is whole, without waiting. -1: an exception is set.
int let_go_now(Mover *mover, Held *held) {
    {
        std::lock_guard guard(held_lock);
        if (held->is_written || group_state(held->group) != SK_GROUP_CLEAN) {
            return 0;
        }
    }
    int is_leaving = begin_leaving(mover, held);
    return is_leaving == 1 ? finish_leaving(mover, held) : is_leaving;
}

// Return a mover's storages that may leave, farthest next use first, then least recently used:
// those that are used after so many uses. `all`: also those that are coming.
std::vector<Held *> list_farthest(const Mover *mover, std::size_t least, bool all) {
    std::lock_guard guard(held_lock);
    const HeldOrder &order = mover->books->held;
    std::vector<std::pair<std::pair<std::size_t, std::uint64_t>, Held *>> found;
    for (Held *each : order.all) {
        std::size_t next = next_use(order, each);
        if (each->pins == 0 && next > least && (each->is_here || all)) {
            found.push_back({{never - next, each->last_use}, each});
        }
    }
    std::sort(found.begin(), found.end());
    std::vector<Held *> sorted;
    sorted.reserve(found.size());
    for (auto &[place, each] : found) {
        sorted.push_back(each);
    }
    return sorted;
}

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

bool start(Mover *mover, Held *held, bool is_tentative, int *started) {
    held->group->serial = ++mover->books->serials; // the copy that is needed soonest
    *started = start_in(mover, held->group, is_tentative);
    return *started >= 0;
}

// Make room for one that is used next in `distance` uses, without waiting.
int make_room(Mover *mover, const Held *coming, std::size_t distance) {
    int is_room = has_room(mover, coming->group->nbytes, true);
    if (is_room != 0) {
        return is_room;
    }
    for (Held *each : list_farthest(mover, distance, false)) {
        int is_gone = let_go_now(mover, each);
        is_room = is_gone == 1 ? has_room(mover, coming->group->nbytes, true) : is_gone;
        if (is_room != 0) {
            return is_room;
        }
    }
    return 0;
}

// Start to bring what is used next, as far as there is room.
bool look_ahead(Mover *mover) {
    HeldOrder &order = mover->books->held;
    std::size_t size = order.last.size(), coming_bytes = 0;
    for (std::size_t i = 1; i < size && coming_bytes < mover->watermark_bytes / ahead; i++) {
        Held *held = order.last[(order.at + i) % size];
        if (is_here(held)) {
            continue;
        }
        int started = 1;
        if (group_state(held->group) == SK_GROUP_OUT) {
            started = make_room(mover, held, i);
            if (started < 0 || (started == 1 && !start(mover, held, true, &started))) {
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

// Bring a storage's bytes. The GIL is held; takes the runtime's lock.
bool bring_held(Held *held) {
    auto mover = Ref<Mover>::share(held->group->mover);
    Locked lock(mover.get());
    if (!lock) {
        return false;
    }
    if (is_here(held)) {
        return true;
    }
    mover->books->held.late++;
    int started = 1;
    if (group_state(held->group) == SK_GROUP_OUT && !start(mover.get(), held, false, &started)) {
        return false;
    }
    return arrive(mover.get(), held) && (mover->books->held.is_over || look_ahead(mover.get()));
}

// ---- which storages are held --------------------------------------------------------------------

// Forget a storage: it is on the device, or dead.
void forget(Mover *mover, Held *held) {
    std::unique_ptr<Held> owned;
    {
        std::lock_guard guard(held_lock);
        HeldOrder &order = mover->books->held;
        std::erase(order.all, held);
        std::erase(order.now, held);
        if (std::erase(order.last, held) != 0) {
            order.now = std::exchange(order.last, {}); // the places of the others have changed
            begin_order(order);
        }
        auto found = table.find(held->group->key.storage);
        owned = std::move(found->second);
        table.erase(found);
    }
    for (c10::TensorImpl *each : held->tensors) {
        if (c10::TensorImpl *tensor = c10::raw::weak_intrusive_ptr::lock(each)) {
            Access::keys(*tensor) = tensor->key_set().remove(held_key());
            c10::raw::intrusive_ptr::decref(tensor);
        }
        c10::raw::weak_intrusive_ptr::decref(each);
    }
    Py_DECREF(held->group);
}

bool is_pinned(const Held *held) {
    std::lock_guard guard(held_lock);
    return held->pins != 0;
}

// Return whether the program holds a storage no more.
bool is_dead(const Held *held) {
    const Group *group = held->group;
    if (is_pinned(held) || group_state(group) == SK_GROUP_COPYING_IN) {
        return false;
    }
    return group->weak != nullptr ? c10::raw::weak_intrusive_ptr::use_count(group->weak) == 0
                                  : count_holders(group->storage) == 1;
}

// Forget dead storages; return the bytes that this frees.
std::size_t sweep(Mover *mover) {
    std::size_t freed = 0;
    for (Held *each : std::vector<Held *>(mover->books->held.all)) {
        if (is_dead(each)) {
            freed += each->group->storage != nullptr ? each->group->nbytes : 0;
            forget(mover, each);
        }
    }
    return freed;
}

} // namespace

// ---- operators ----------------------------------------------------------------------------------

HeldUses::~HeldUses() {
    if (!uses_.empty()) {
        std::lock_guard guard(held_lock);
        for (Held *each : uses_) {
            each->pins--;
        }
    }
}

void HeldUses::add(const c10::StorageImpl *storage, bool writes) {
    std::lock_guard guard(held_lock);
    if (Held *held = find(storage)) {
        held->pins++;
        held->is_written = held->is_written || writes;
        note_use(held);
        is_late_ = is_late_ || !held->is_here;
        uses_.push_back(held);
    }
}

void HeldUses::bring() {
    if (!is_late_) {
        return;
    }
    WithPython python;
    PutAside former; // an operator may run while an exception is raised
    for (Held *each : uses_) {
        if (!is_here(each) && !bring_held(each)) {
            python_error error;
            error.persist();
            throw error;
        }
    }
}

bool held_aliased(const c10::TensorImpl *alias) {
    if (!is_trapped(*alias)) {
        return false;
    }
    std::lock_guard guard(held_lock);
    Held *held = find(alias->unsafe_storage().unsafeGetStorageImpl());
    bool is_own = held == nullptr || std::find(held->tensors.begin(), held->tensors.end(), alias) !=
                                         held->tensors.end();
    if (!is_own) {
        held->handles++;
    }
    return !is_own;
}

void held_unaliased(const c10::TensorImpl *alias) {
    std::lock_guard guard(held_lock);
    Held *held = find(alias->unsafe_storage().unsafeGetStorageImpl());
    if (held != nullptr && held->handles != 0) {
        held->handles--;
    }
}

// ---- for the session ----------------------------------------------------------------------------

int hold(Mover *mover, PyObject *tensor, PyObject *placement) {
    c10::TensorImpl *impl = nullptr;
    Terms terms = {};
    if (!impl_of(tensor, &impl) || !terms_read(placement, &terms) || !trap_register()) {
        return -1;
    }
    Ref<> own = Ref<>::steal(terms.placement); // `group_new` takes its own
    c10::StorageImpl *storage = plain_storage(*impl, 1);
    if (storage == nullptr || impl->device() != mover->device()) {
        return 0;
    }
    Held *held = find(storage);
    if (held != nullptr && held->group->mover != mover) {
        if (!order_of(held).is_over) {
            return 0;
        }
        if (!bring_held(held)) {
            return -1;
        }
        forget(held->group->mover, held);
        held = nullptr;
    }
    if (held == nullptr) {
        if (!is_counted(mover, *storage)) {
            return 0;
        }
        Group *group = group_new(mover, terms, {.storage = storage, .version = 0});
        if (group == nullptr) {
            return -1;
        }
        group->is_held = 1;
        group->cover = {.begin_bytes = 0, .end_bytes = group->nbytes};
        auto made = std::make_unique<Held>();
        made->group = group;
        std::lock_guard guard(held_lock);
        held = made.get();
        table.emplace(storage, std::move(made));
        mover->books->held.all.push_back(held);
    }
    std::lock_guard guard(held_lock);
    if (std::find(held->tensors.begin(), held->tensors.end(), impl) == held->tensors.end()) {
        held->tensors.push_back(c10::raw::intrusive_ptr::make_weak(impl));
        Access::keys(*impl) = impl->key_set().add(held_key());
    }
    return 1;
}

Ref<> held_free(Mover *mover, unsigned long long needed_bytes, bool spares) {
    std::size_t freed = sweep(mover), leaving_bytes = 0;
    std::vector<Held *> leaving;
    std::size_t least = spares ? mover->books->held.last.size() / soon : 0;
    for (Held *each : list_farthest(mover, least, !spares)) {
        if (freed + leaving_bytes >= needed_bytes) {
            break;
        }
        if (group_state(each->group) == SK_GROUP_COPYING_IN && !arrive(mover, each)) {
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

void held_end_step(Mover *mover) {
    (void)sweep(mover);
    std::lock_guard guard(held_lock);
    if (!mover->books->held.now.empty()) {
        begin_order(mover->books->held);
    }
}

Ref<> held_end(Mover *mover) {
    HeldOrder &order = mover->books->held;
    order.is_over = true;
    (void)sweep(mover);
    for (Held *each : std::vector<Held *>(order.all)) {
        int started = 1;
        if (group_state(each->group) == SK_GROUP_OUT && !start(mover, each, true, &started)) {
            return {};
        }
        if (started == 0) {
            continue;
        }
        if (!is_here(each) && !arrive(mover, each)) {
            return {};
        }
        if (!is_pinned(each)) {
            forget(mover, each);
        }
    }
    return for_python(order.all.size());
}

Ref<> held_bytes(Mover *mover) {
    unsigned long long all = 0, here = 0, kept = 0;
    for (const Held *each : mover->books->held.all) {
        all += each->group->nbytes;
        if (is_here(each)) {
            std::size_t known = count_known(each, each->group->storage);
            std::lock_guard guard(held_lock);
            here += each->group->nbytes;
            kept += is_ours(each, known) ? 0 : each->group->nbytes;
        }
    }
    return Ref<>::steal(Py_BuildValue("(KKKK)", all, here, kept,
                                      static_cast<unsigned long long>(mover->books->held.late)));
}

} // namespace swapkit
