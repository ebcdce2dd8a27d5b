// mover.hpp - finding groups and moving them.
//
// A *mover* (`Mover`) finds groups by storage and version, and by the order in which they were
// saved. Its hooks run for every saved tensor, so the common paths are in C++. Policy decisions go
// to the mover's owner in Python (`saved/swapper.py`).
//
// Functions that may fail set an exception and return false (bool) or -1 (int).
#ifndef SWAPKIT_MOVER_HPP
#define SWAPKIT_MOVER_HPP

#include "held/held.hpp"
#include "moves/agenda.hpp"
#include "python/lock.hpp"
#include "saved/carried.hpp"
#include "saved/saved_tensors.hpp"

#include <limits>
#include <map>
#include <unordered_map>
#include <utility>

namespace swapkit {

struct KeyHash {
    std::size_t operator()(const Key &key) const {
        return reinterpret_cast<std::size_t>(key.storage) / alignof(c10::StorageImpl) +
               key.version * std::size_t{0x9e3779b9};
    }
};

struct Books {
    std::unordered_map<Key, Group *, KeyHash> index; // groups that a tensor may join
    BySerial resident;                               // groups with a storage on the device
    // Groups without a storage whose first one other code kept, by that storage.
    std::unordered_multimap<const c10::StorageImpl *, Group *> kept;
    Agenda agenda;                      // when groups leave and come back
    HeldOrder held;                     // what the program holds itself
    std::size_t recomputed = 0;         // groups that have a recipe
    Carried captured;                   // captured without a plan (`standby.hpp`)
    const void *retained_run = nullptr; // the region that was recomputed last,
    std::int64_t retained_task = -1;    // the backward pass that did so,
    std::vector<Ref<Group>> retained;   // and its recomputed groups, if it retains its graph
    bool has_dropped = false;           // a rescue dropped spare groups: recipes may be needed
    bool is_early = false;              // recomputing ahead of backward, which may need it again
    std::uint64_t serials = 0;
    std::map<std::pair<std::uint32_t, std::uint32_t>, double> stalls; // seconds waited, per site
};

inline constexpr unsigned long long no_limit = std::numeric_limits<unsigned long long>::max();

struct Mover {
    PyObject ob_base;
    PyObject *weakrefs;
    PyObject *policy;    // the owner, which decides (`saved/swapper.py`)
    PyObject *tracker;   // knows the current module
    PyObject *scheduler; // has to outlive its groups
    Lock *lock;          // owned: the runtime's
    sk_sched *sched;
    unsigned long long pool; // address of the pool of its storages; 0: not one of our pools
    Books *books;
    struct Timing *timing; // owned: moves timed by operators (`prefetch.hpp`); null: none
    Follower *follower;    // owned: carries out a plan (`plan_cursor.hpp`); null: no plan
    unsigned long long waits;
    unsigned long long repeated; // recomputed operators, and regions
    c10::DeviceType device_type;
    c10::DeviceIndex device_index;
    // Write-behind (`write_behind.hpp`): the bytes in use at which it starts, the copies at once,
    // and the bytes left to copy in this step.
    unsigned long long watermark_bytes, most_copying, ahead_bytes;
    unsigned held_tag;      // of the memory in which held storages come
    char holds_copies;      // write-behind is paused
    char makes_reclaimable; // write-behind makes groups reclaimable (`reclaimable.hpp`)
    char hears_saves;       // notify the policy of each group saved under the budget
    char host_is_full;      // a copy out found no room since this was last reset
    char has_disk;

    c10::Device device() const { return {device_type, device_index}; }
};

extern Type mover_type, packer_type;

// Holds the runtime's lock. False: the wait was interrupted.
class Locked : Unmovable {
  public:
    explicit Locked(const Mover *mover)
        : lock_(Ref<Lock>::share(mover->lock)), is_held_(lock_acquire(mover->lock)) {}
    ~Locked() {
        if (is_held_) {
            lock_release(lock_.get());
        }
    }
    explicit operator bool() const { return is_held_; }

  private:
    Ref<Lock> lock_;
    bool is_held_;
};

// ---- finding groups -----------------------------------------------------------------------------

// Return the group of this storage and version, if `tensor` can join it.
Ref<Group> find_group(Mover *mover, const c10::TensorImpl *tensor, Key key, Span span);
// Return the group of this storage and version, if its bytes are recomputed.
Ref<Group> find_recomputed(Mover *mover, Key key);
// Index a group whose storage is on the device, by storage and by age.
void enroll(Mover *mover, Group *group);
// Index a group that has a storage again.
void enroll_again(Mover *mover, Group *group);
// Note that a group has no storage any more.
void enroll_out(Mover *mover, Group *group);
// Index a group that has a recipe and no storage.
void enroll_recomputed(Mover *mover, Group *group);
// Drop the copy of a group that has a recipe.
void forget_copy(Mover *mover, Group *group);
// Return whether any group has released a storage that other code kept. On any thread, without the
// GIL.
bool is_any_kept();
// Give the storage back to the groups that released it while others kept it, with what their copies
// have. Any mover's groups; takes the lock of each. False: an exception is set.
bool revive_kept(const c10::StorageImpl *storage);
// Find the storage of a saved tensor at this address, and wait for a copy that fills it. Searches
// the groups of all movers, one by one; takes the lock of each. Return a new reference in `*out`;
// null: there is none. False: an exception is set.
bool storage_at(const void *address, c10::StorageImpl **out);
// Add or remove a mover that such searches see.
void mover_join(Mover *mover);
void mover_part(Mover *mover);
// Remove a group that is being destroyed from all indexes.
void mover_forget(Mover *mover, Group *group);

// ---- moving them --------------------------------------------------------------------------------

// Start copying a resident group out. 1: the copy is under way; 0: there is no room for it.
int copy_out(Mover *mover, Group *group);
// Return whether no copy out is under way. Does not wait.
int poll_out(Mover *mover, Group *group);
// Wait for a copy out. 0: there is none, or it failed for lack of room, and the storage stays.
int finish_out(Mover *mover, Group *group);
// As copy_out; once the copy is done, a rescue may take the storage.
int make_reclaimable(Mover *mover, Group *group);
// Release the memory of a clean group.
bool release(Mover *mover, Group *group);
// Start copying a group back that is out. 0: the call is `tentative`, and getting the memory would
// need waiting or a rescue. -1: an exception is set.
int start_in(Mover *mover, Group *group, bool tentative);
// Return whether `nbytes` may come back. `spares`: keep a reserve for operators. -1: an exception
// is set.
int has_room(Mover *mover, std::size_t nbytes, bool spares);
// Start bringing a group back if there is room. 0: there is no room.
int bring_early(Mover *mover, Group *group);
// As bring_early, for a group whose room the plan has accounted for.
int bring_planned(Mover *mover, Group *group);
// Recompute a group ahead of its use, if there is room, and if its bytes are recomputed at all. It
// keeps its recipe: backward may begin several passes from here. 0: there is no room; -1: an
// exception is set.
int recompute_early(Mover *mover, Group *group);
// Give a group its bytes again, waiting if necessary. Start prefetching the groups needed next.
bool bring_back(Mover *mover, Group *group);
// Wait for a copy back, if one is under way.
bool finish_in(Mover *mover, Group *group);

// ---- the hooks ----------------------------------------------------------------------------------

// Read a `Choice`. The terms own a reference to it.
bool terms_read(PyObject *placement, Terms *out);
// Create the hooks of a scope: methods `pack` and `unpack`, and an `observer` that each call
// notifies: `saved(tensor, packed)`, `used(packed, tensor)`.
Ref<Packer> packer_new(Mover *mover, PyObject *placement);
// Set the module that this thread's saves belong to from now on. 0: ask the tracker of modules
// again.
void set_coarse_site(std::uint32_t tag);
// The unpack hook of every scope. Its argument is a handle, or has its own `unpack` method.
PyObject *unpack(PyObject *handle);

} // namespace swapkit

#endif
