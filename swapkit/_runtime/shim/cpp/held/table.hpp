// table.hpp - the held storages, for the files of this folder.
#ifndef SWAPKIT_HELD_TABLE_HPP
#define SWAPKIT_HELD_TABLE_HPP

#include "held/held.hpp"
#include "moves/mover.hpp"

#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace swapkit {

struct Held {
    Group *group; // owned
    // The program's tensors with the key. Only compared: one may be freed, and another one be
    // there.
    std::vector<const c10::TensorImpl *> tensors;
    std::vector<std::size_t> uses; // where it is in the last step's order
    std::size_t pins = 0;          // operators that run with it
    std::uint64_t last_use = 0;
    // Those that wait for the arrival, which was on the group's stream.
    c10::SmallVector<std::int64_t, 2> streams;
    bool is_here = true;
    bool is_written = false; // since it was copied
    bool is_new = false;     // written since it came
    bool is_sealed = false;  // reading its address raises torch's error while no operator runs
    bool is_kept = false;    // it does not leave any more
};

extern std::mutex &held_lock;
// By storage; the group keeps its address from others.
extern std::unordered_map<const c10::StorageImpl *, std::unique_ptr<Held>> &held_table;
// Handles of saved tensors by their alias, by storage: they outlive sessions.
extern std::unordered_map<const c10::StorageImpl *,
                          std::unordered_map<const c10::TensorImpl *, std::size_t>> &held_aliases;

inline HeldOrder &order_of(const Held *held) { return held->group->mover->books->held; }

// ---- the lock is held ----

// Return what is known of a storage; null: it is not held.
Held *find_held(const c10::StorageImpl *storage);
// Note whether the bytes of a storage are on the device.
void set_here(Held *held, bool is_here);
// Let code read the address of a storage, or not.
void seal(const Held *held, bool is_closed);
// Begin the order of a new step.
void begin_order(HeldOrder &order);
// Note that an operator uses a storage.
void count_use(Held *held);

// ---- it is not ----

// Return whether the bytes of a storage are on the device.
bool is_here(const Held *held);
// Finds a mover's storages that may leave for so many bytes, one by one: those that the last step
// did not use, least recently used first, then those that are used after so many uses, farthest
// first. `all`: also those that are coming, and at last small ones. The GIL is held.
class Farthest {
  public:
    Farthest(Mover *mover, std::size_t needed_bytes, std::size_t least, bool all);
    // Return the next one; null: there is none.
    Held *next();

  private:
    void begin();
    Held *take();

    const HeldOrder &order_;
    std::size_t few_bytes_, least_;
    bool all_, is_last_ = false;
    std::vector<Held *> idle_; // a heap
    std::size_t at_ = 0, distance_ = 0;
};
// Bring a storage's bytes to this thread's stream. The GIL is held; takes the runtime's lock.
bool bring_held(Held *held);
// Forget a storage that is on the device, or dead. The GIL and the runtime's lock are held. False:
// an operator runs with it.
bool forget_held(Mover *mover, Held *held);

} // namespace swapkit

#endif
