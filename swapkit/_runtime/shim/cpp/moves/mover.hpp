// mover.hpp - who finds groups, and moves them.
//
// A *mover* (`Mover`) finds groups by storage and version, and by the order in which they were
// saved. Its hooks run for every saved tensor, so what they do most often is here; what is a matter
// of policy they ask of its owner in Python (`saved/swapper.py`).
//
// Functions that may fail return bool with false, or int with -1, and an exception is set then.
#ifndef SWAPKIT_MOVER_HPP
#define SWAPKIT_MOVER_HPP

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
    std::unordered_map<Key, Group *, KeyHash> index; // of those that a tensor may join
    BySerial resident;                               // storage on the device
    Agenda agenda;                                   // when groups leave and come back
    std::size_t recomputed = 0;                      // groups that a recipe makes
    Carried captured;                                // and that no plan has named (`standby.hpp`),
    const void *retained_run = nullptr;              // the region that was computed again last,
    std::int64_t retained_task = -1;                 // in which backward pass,
    std::vector<Ref<Group>> retained; // and what a pass that retains its graph has of it
    bool has_dropped = false;         // some of which may need others in this step
    std::uint64_t serials = 0;
    std::map<std::pair<std::uint32_t, std::uint32_t>, double> stalls; // seconds waited, by site
};

inline constexpr unsigned long long no_limit = std::numeric_limits<unsigned long long>::max();

struct Mover {
    PyObject ob_base;
    PyObject *weakrefs;
    PyObject *policy;    // what decides
    PyObject *tracker;   // names of modules
    PyObject *scheduler; // which has to outlive its groups
    Lock *lock;          // owned: the runtime's
    sk_sched *sched;
    unsigned long long pool; // address of the one that its storages are in; 0: none of ours
    Books *books;
    struct Timing *timing; // owned: whose operators time moves; null: nobody's
    Follower *follower;    // owned: who carries out a plan (`plan_cursor.hpp`); null: there is none
    double waited_seconds; // for copies, since the mover was made
    unsigned long long waits;
    unsigned long long repeated; // operators that ran again
    c10::DeviceType device_type;
    c10::DeviceIndex device_index;
    // Copying ahead (`write_behind.hpp`): from so many bytes in use on, at most so many at once,
    // and so many bytes in this step.
    unsigned long long watermark_bytes, most_copying, ahead_bytes;
    char holds_copies; // nothing is copied ahead
    char sets_aside;   // but set aside (`reclaimable.hpp`)
    char hears_saves;  // the policy is told what is saved under the budget
    char host_is_full; // a copy out found no room since this was last unset
    char has_disk;

    c10::Device device() const { return {device_type, device_index}; }
};

extern PyTypeObject mover_type, packer_type;

// Holds the runtime's lock; false: the wait was interrupted.
class Locked {
  public:
    explicit Locked(const Mover *mover)
        : lock_(Ref<Lock>::share(mover->lock)), is_held_(lock_acquire(mover->lock)) {}
    ~Locked() {
        if (is_held_) {
            lock_release(lock_.get());
        }
    }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;
    explicit operator bool() const { return is_held_; }

  private:
    Ref<Lock> lock_;
    bool is_held_;
};

// ---- finding groups -----------------------------------------------------------------------------

// The group of this storage and version, if one more view of it can join: this tensor.
Ref<Group> find_group(Mover *mover, const c10::TensorImpl *tensor, Key key, Span span);
// The group of this storage and version, if its bytes are computed again.
Ref<Group> find_recomputed(Mover *mover, Key key);
// Make a group whose storage is on the device found: by its storage, and by its age.
void enroll(Mover *mover, Group *group);
// The same of one that has a storage again.
void enroll_again(Mover *mover, Group *group);
// Note that a group has none any more.
void enroll_out(Mover *mover, Group *group);
// Make a group found that a recipe makes, and that has no storage.
void enroll_recomputed(Mover *mover, Group *group);
// Let a group whose bytes can be computed again have no copy any more.
void forget_copy(Mover *mover, Group *group);
// Let a group that goes have no place in the books any more.
void mover_forget(Mover *mover, Group *group);

// ---- moving them --------------------------------------------------------------------------------

// Start copying a resident group out. 1: it is under way; 0: there is no room for the copy.
int copy_out(Mover *mover, Group *group);
// Whether no copy out is under way any more, without waiting for it.
int poll_out(Mover *mover, Group *group);
// Wait for a copy out. 0: there is none, or it failed without harm.
int finish_out(Mover *mover, Group *group);
// As copy_out; and leave the storage to whoever wants its memory once the copy is done.
int set_aside(Mover *mover, Group *group);
// Give up the memory of a clean group.
bool release(Mover *mover, Group *group);
// Start bringing a group back if there is room for it. 0: there is none.
int bring_early(Mover *mover, Group *group);
// The same of one that a plan brings back, whose room the plan has seen to.
int bring_planned(Mover *mover, Group *group);
// Give a group its bytes again, waiting if need be, and start those needed next.
bool bring_back(Mover *mover, Group *group);
// Wait for a copy back, if one is under way.
bool finish_in(Mover *mover, Group *group);

// ---- the hooks ----------------------------------------------------------------------------------

// Read a `Choice`. The terms own a reference to it.
bool terms_read(PyObject *choice, Terms *out);
// The hooks of a scope: methods `pack` and `unpack`, and an `observer` that is told of each call of
// them: `saved(tensor, packed)`, `used(packed, tensor)`.
PyObject *packer_new(Mover *mover, PyObject *choice);
// rest_at(tag): where this thread saves what it does from now on, whatever runs; 0: the tracker of
// modules is asked.
PyObject *rest_at(PyObject *module, PyObject *tag);
// What every scope's unpack hook does; its argument is a handle, or has an `unpack` of its own.
PyObject *unpack(PyObject *module, PyObject *handle);

} // namespace swapkit

#endif
