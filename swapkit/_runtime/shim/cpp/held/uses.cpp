// uses.cpp - what operators and saved tensors use of held storages.
#include "held/table.hpp"

#include "memory/streams.hpp"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <pthread.h>
#include <utility>

namespace swapkit {

// Never freed, as in `weights.cpp`.
std::mutex &held_lock = *new std::mutex;
std::unordered_map<const c10::StorageImpl *, std::unique_ptr<Held>> &held_table =
    *new std::unordered_map<const c10::StorageImpl *, std::unique_ptr<Held>>;
std::unordered_map<const c10::StorageImpl *,
                   std::unordered_map<const c10::TensorImpl *, std::size_t>> &held_aliases =
    *new std::unordered_map<const c10::StorageImpl *,
                            std::unordered_map<const c10::TensorImpl *, std::size_t>>;

std::unordered_map<const c10::StorageImpl *, std::size_t> &watched_running =
    *new std::unordered_map<const c10::StorageImpl *, std::size_t>;
std::unordered_set<const c10::StorageImpl *> &watched_exposed =
    *new std::unordered_set<const c10::StorageImpl *>;

[[maybe_unused]] static const int held_at_fork = pthread_atfork(
    [] { held_lock.lock(); }, [] { held_lock.unlock(); }, [] { held_lock.unlock(); });

// The order is searched so far for a use that comes out of turn.
static constexpr std::size_t out_of_turn = 64;
// Without steps, so many uses in a row are taken for one.
static constexpr std::size_t most_uses = 1 << 16;
// An operator on lists uses this part of a mover's watermark at once.
static constexpr std::size_t parts = 8;

Held *find_held(const c10::StorageImpl *storage) {
    auto found = held_table.find(storage);
    return found == held_table.end() ? nullptr : found->second.get();
}

bool is_here(const Held *held) {
    std::lock_guard guard(held_lock);
    return held->is_here;
}

void seal(const Held *held, bool is_closed) {
    if (held->is_sealed && held->is_here) {
        storage_seal(held->group->storage, is_closed);
    }
}

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

void count_use(Held *held) {
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

std::size_t next_use(const HeldOrder &order, const Held *held) {
    if (held->uses.empty()) {
        return never;
    }
    auto next = std::upper_bound(held->uses.begin(), held->uses.end(), order.at);
    return next != held->uses.end() ? *next - order.at
                                    : held->uses.front() + order.last.size() - order.at;
}

// ---- operators ----------------------------------------------------------------------------------

namespace {

// Return whether this thread's stream may not use a storage yet. The lock is held.
bool needs_bringing(const Held *held) {
    c10::Device device = held->group->mover->device();
    return !held->is_here ||
           (has_streams(device) && std::find(held->streams.begin(), held->streams.end(),
                                             current_stream(device)) == held->streams.end());
}

bool is_late(const Held *held) {
    std::lock_guard guard(held_lock);
    return needs_bringing(held);
}

// Return the current Python exception for torch, which raises it where Python is called.
python_error caught() {
    python_error error;
    error.persist();
    return error;
}

// Forget storages of sessions that have ended, now that they are here.
void end_over() {
    WithPython python;
    PutAside former;
    std::vector<Ref<Mover>> movers;
    {
        std::lock_guard guard(held_lock);
        for (const auto &[storage, held] : held_table) {
            if (order_of(held.get()).is_over && held->is_here && held->pins == 0) {
                movers.push_back(Ref<Mover>::share(held->group->mover));
            }
        }
    }
    for (const Ref<Mover> &mover : movers) {
        Locked lock(mover.get());
        for (Held *each :
             lock ? std::vector<Held *>(mover->books->held.all) : std::vector<Held *>()) {
            if (is_here(each)) {
                (void)forget_held(mover.get(), each);
            }
        }
        (void)call_method<"weights_ended">(mover->policy);
    }
    PyErr_Clear();
}

} // namespace

HeldUses::~HeldUses() {
    if (uses_.empty() && watched_.empty()) {
        return;
    }
    bool is_any_over = false;
    {
        std::lock_guard guard(held_lock);
        for (const c10::StorageImpl *each : watched_) {
            auto found = watched_running.find(each);
            if (--found->second == 0) {
                watched_running.erase(found);
            }
        }
        for (Held *each : uses_) {
            each->pins--;
            seal(each, each->pins == 0);
            is_any_over = is_any_over || order_of(each).is_over;
        }
    }
    if (is_any_over) {
        end_over();
    }
}

void HeldUses::add(const c10::StorageImpl *storage, bool writes) {
    std::lock_guard guard(held_lock);
    if (Held *held = find_held(storage)) {
        seal(held, false);
        held->pins++;
        held->is_written = held->is_written || writes;
        count_use(held);
        is_late_ = is_late_ || needs_bringing(held);
        uses_.push_back(held);
    } else if (storage != nullptr) {
        watched_running[storage]++;
        watched_.push_back(storage);
    }
}

void HeldUses::bring() {
    if (!is_late_) {
        return;
    }
    WithPython python;
    PutAside former; // an operator may run while an exception is raised
    for (Held *each : uses_) {
        if (is_late(each) && !bring_held(each)) {
            throw caught();
        }
    }
}

void HeldUses::keep() {
    std::lock_guard guard(held_lock);
    for (Held *each : uses_) {
        each->is_kept = true;
        each->is_sealed = false;
    }
}

int is_sealed(std::size_t storage) {
    std::lock_guard guard(held_lock);
    const Held *held = find_held(reinterpret_cast<const c10::StorageImpl *>(storage));
    return held != nullptr && held->is_sealed ? 1 : 0;
}

PyObject *run_with(Mover *, std::size_t read, std::size_t written, PyObject *function) {
    HeldUses uses;
    uses.add(reinterpret_cast<const c10::StorageImpl *>(read), false);
    uses.add(reinterpret_cast<const c10::StorageImpl *>(written), true);
    uses.bring();
    return PyObject_CallNoArgs(function);
}

std::size_t held_most_bytes(const c10::TensorImpl &tensor) {
    if (!is_trapped(tensor) || !tensor.has_storage()) {
        return 0;
    }
    std::lock_guard guard(held_lock);
    const Held *held = find_held(tensor.unsafe_storage().unsafeGetStorageImpl());
    return held == nullptr ? 0 : held->group->mover->watermark_bytes / parts;
}

bool held_aliased(const c10::TensorImpl *alias) {
    if (!is_trapped(*alias)) {
        return false;
    }
    std::lock_guard guard(held_lock);
    held_aliases[alias->unsafe_storage().unsafeGetStorageImpl()][alias]++;
    return true;
}

void held_unaliased(const c10::TensorImpl *alias) {
    std::lock_guard guard(held_lock);
    auto found = held_aliases.find(alias->unsafe_storage().unsafeGetStorageImpl());
    if (found == held_aliases.end()) {
        return;
    }
    auto handles = found->second.find(alias);
    if (handles != found->second.end() && --handles->second == 0) {
        found->second.erase(handles);
        if (found->second.empty()) {
            held_aliases.erase(found);
        }
    }
}

} // namespace swapkit
