// uses.cpp - what operators and saved tensors use of held storages.
#include "held/table.hpp"

#include "memory/streams.hpp"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <iterator>
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

void set_here(Held *held, bool is_here) {
    held->is_here = is_here;
    for (std::size_t at : held->uses) {
        order_of(held).here[at] = is_here ? 1 : 0;
    }
}

void seal(const Held *held, bool is_closed) {
    if (held->is_sealed && held->is_here) {
        storage_seal(held->group->storage, is_closed);
    }
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

// Note that an operator changes a storage. The lock is held.
void count_write(Held *held) {
    if (!held->is_written) {
        order_of(held).written.push_back(held);
    }
    held->is_written = held->is_new = true;
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
    if (!uses_.empty() || !watched_.empty()) {
        unpin();
    }
}

bool HeldUses::unpin_all() {
    bool is_any_over = false;
    for (const c10::StorageImpl *each : watched_) {
        auto found = watched_running.find(each);
        if (--found->second == 0) {
            watched_running.erase(found);
        }
    }
    for (Held *each : uses_) {
        each->user = nullptr;
        each->pins--;
        each->regions -= is_region_ ? 1 : 0;
        seal(each, each->pins == 0);
        is_any_over = is_any_over || order_of(each).is_over;
    }
    uses_.clear();
    watched_.clear();
    return is_any_over;
}

void HeldUses::unpin() {
    bool is_any_over = false;
    {
        std::lock_guard guard(held_lock);
        is_any_over = unpin_all();
    }
    if (is_any_over) {
        end_over();
    }
}

void HeldUses::finish() {
    bool is_waited_for = false, is_any_over = false;
    if (!uses_.empty()) {
        std::lock_guard guard(held_lock);
        for (Held *each : uses_) {
            if (is_region_) {
                count_use(each);
            }
            const HeldOrder &order = order_of(each);
            is_waited_for = is_waited_for || !order.leaving.empty() || !order.following.empty();
        }
        is_any_over = !is_waited_for && unpin_all();
    }
    if (is_any_over) {
        end_over();
    }
    if (is_waited_for) {
        WithPython python;
        PutAside former;
        auto mover = Ref<Mover>::share(uses_.front()->group->mover);
        unpin();
        Locked lock(mover.get());
        if (lock && (!leave_planned(mover.get()) || !come_planned(mover.get()))) {
            throw caught();
        }
    }
}

template <bool (*moves)(Mover *)> static bool carry_out(const Held *held) {
    auto mover = Ref<Mover>::share(held->group->mover);
    Locked lock(mover.get());
    return lock && moves(mover.get());
}

void HeldUses::pin(const c10::StorageImpl *storage, Held *held) {
    if (held != nullptr) {
        seal(held, false);
        held->pins++;
        held->regions += is_region_ ? 1 : 0;
        is_late_ = is_late_ || needs_bringing(held);
        uses_.push_back(held);
    } else if (storage != nullptr) {
        watched_running[storage]++;
        watched_.push_back(storage);
    }
}

void HeldUses::add(const c10::StorageImpl *storage, bool writes, bool is_expected) {
    std::lock_guard guard(held_lock);
    if (writes) {
        forget_file(storage);
    }
    Held *held = find_held(storage);
    bool is_again = held != nullptr && held->user == this; // a recording counts it once, too
    if (!is_again) {
        pin(storage, held);
    }
    if (held != nullptr) {
        held->user = this;
        if (writes) {
            count_write(held);
        }
        if (is_expected && !is_again) {
            count_use(held);
            is_due_ = is_due_ || is_due(order_of(held), held);
        }
    }
}

void HeldUses::add_again(const c10::TensorImpl &operand) {
    if (is_trapped(operand) && operand.has_storage()) {
        std::lock_guard guard(held_lock);
        const c10::StorageImpl *storage = operand.unsafe_storage().unsafeGetStorageImpl();
        pin(storage, find_held(storage));
    }
}

void HeldUses::bring() {
    if (!is_late_ && !is_due_) {
        return;
    }
    WithPython python;
    PutAside former; // an operator may run while an exception is raised
    if (is_due_ && !carry_out<leave_planned>(uses_.front())) {
        throw caught();
    }
    std::vector<Held *> late;
    std::copy_if(uses_.begin(), uses_.end(), std::back_inserter(late), is_late);
    // All of them come before what is used next does.
    if (!std::all_of(late.begin(), late.end(), begin_bringing) ||
        !std::all_of(late.begin(), late.end(), bring_held) ||
        (!late.empty() && !bring_next(late.back()))) {
        throw caught();
    }
    if (is_due_ && !carry_out<come_planned>(uses_.front())) {
        throw caught();
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
