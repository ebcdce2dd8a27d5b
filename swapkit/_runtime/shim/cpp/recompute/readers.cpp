// readers.cpp - finding recipes by the storages that they read or make.
#include "recompute/recipes.hpp"

#include "saved/weights.hpp"

#include <atomic>
#include <mutex>
#include <pthread.h>
#include <unordered_map>

namespace swapkit {

namespace {

// Recipes by storage. Never freed: there is no safe point at which to free them.
auto &readers = *new std::unordered_multimap<const c10::StorageImpl *, Recipe *>;
auto &readers_lock = *new std::mutex; // in addition to the GIL: lookups go without that
std::atomic<std::size_t> readers_count{0};

// A forked child runs operators and looks recipes up, too: it must find the lock free. No other
// lock is taken while this one is held.
[[maybe_unused]] const int readers_at_fork = pthread_atfork(
    [] { readers_lock.lock(); }, [] { readers_lock.unlock(); }, [] { readers_lock.unlock(); });

void add_storage(const at::Tensor &tensor, std::vector<c10::StorageImpl *> *out) {
    if (tensor.defined() && tensor.has_storage()) {
        out->push_back(tensor.storage().unsafeGetStorageImpl());
    }
}

void add_storages(const c10::IValue &value, std::vector<c10::StorageImpl *> *out) {
    if (value.isTensor()) {
        add_storage(value.toTensor(), out);
    } else if (value.isTensorList()) {
        for (const at::Tensor &each : value.toTensorVector()) {
            add_storage(each, out);
        }
    }
}

} // namespace

std::vector<c10::StorageImpl *> written_storages(const Named *named, const c10::IValue *arguments) {
    std::vector<c10::StorageImpl *> changed;
    for (std::size_t at : named->declared) {
        add_storages(arguments[at], &changed);
    }
    if (!named->undeclared.empty() && named->is_training(arguments)) {
        for (std::size_t at : named->undeclared) {
            add_storages(arguments[at], &changed);
        }
    }
    return changed;
}

void add_reader(Recipe *recipe, const c10::StorageImpl *storage) {
    recipe->reads.push_back(storage);
    std::lock_guard lock(readers_lock);
    readers.emplace(storage, recipe);
    readers_count = readers.size();
}

void remove_reader(Recipe *recipe) {
    std::lock_guard lock(readers_lock);
    for (const c10::StorageImpl *storage : recipe->reads) {
        auto [first, last] = readers.equal_range(storage);
        for (auto each = first; each != last; ++each) {
            if (each->second == recipe) {
                readers.erase(each);
                break;
            }
        }
    }
    recipe->reads.clear();
    readers_count = readers.size();
}

std::vector<RecipeRef> find_readers(const std::vector<c10::StorageImpl *> &storages) {
    std::vector<RecipeRef> found;
    std::lock_guard lock(readers_lock);
    for (const c10::StorageImpl *storage : storages) {
        auto [first, last] = readers.equal_range(storage);
        for (auto each = first; each != last; ++each) {
            found.emplace_back(each->second);
        }
    }
    return found;
}

// Recipes of this thread's operators are counted already. A recipe that another thread makes now
// begins after the change, or is unordered with it.
bool may_settle_any() {
    return readers_count.load(std::memory_order_relaxed) != 0 || is_any_weight();
}

bool may_settle(const c10::StorageImpl *changed) {
    if (is_of_weight(changed)) {
        return true;
    }
    std::lock_guard lock(readers_lock);
    return readers.find(changed) != readers.end();
}

} // namespace swapkit
