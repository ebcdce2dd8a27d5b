// table.hpp - the held storages, for the files of this folder.
#ifndef SWAPKIT_HELD_TABLE_HPP
#define SWAPKIT_HELD_TABLE_HPP

#include "held/held.hpp"
#include "moves/mover.hpp"

#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace swapkit {

using Streams = c10::SmallVector<std::int64_t, 2>;

struct Held {
    Group *group; // owned
    // The program's tensors with the key. Only compared: one may be freed, and another one be
    // there.
    std::vector<const c10::TensorImpl *> tensors;
    std::vector<std::size_t> uses; // where it is in the last step's order
    std::size_t pins = 0;          // operators and compiled regions that run with it
    std::size_t regions = 0;       // those of them that are regions
    const void *user = nullptr;    // the operands that it was added to last; only compared
    std::uint64_t last_use = 0;
    // Those that wait for the arrival, which was on the group's stream.
    Streams streams;
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

// How many operators run with storages that may be held, and are not; and those whose address other
// code may know. Only compared.
extern std::unordered_map<const c10::StorageImpl *, std::size_t> &watched_running;
extern std::unordered_set<const c10::StorageImpl *> &watched_exposed;

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

// Note that the moves of a plan are due, to the latest use.
void note_due(HeldOrder &order);
// Note that an operator uses a storage, perhaps the one that leaves behind a later operator.
void note_again(HeldOrder &order, const Held *held);
// Note that storages are due to leave that a step begins without, such as after an evaluation.
void note_left(HeldOrder &order);
// Return whether such moves wait; not for the operator that runs with a storage.
bool is_due(const HeldOrder &order, const Held *running);
// Forget a plan, which knows all storages, and what it lets happen.
void forget_plan(HeldOrder &order);

// Forget which file a storage was loaded from.
void forget_file(const c10::StorageImpl *storage);

// ---- it is not ----

// Return whether the bytes of a storage are on the device.
bool is_here(const Held *held);
// Let a storage leave: without waiting if it has a copy. 0: it stays; -1: an exception is set.
int let_go(Mover *mover, Held *held);
// The same, only if its copy is whole.
int let_go_now(Mover *mover, Held *held);
// Start copying out what operators on these streams have made of a storage, unless there is a copy
// of it. 0: there is no room; -1: an exception is set.
int start_out(Mover *mover, Held *held, const Streams &streams, bool is_written);
// The same for a storage that stays meanwhile. 0: it does not leave, or an operator runs with it.
int copy_while_here(Mover *mover, Held *held);
// Copy storages out that operators have written, as many bytes as such storages have left with.
// False: an exception is set.
bool copy_behind(Mover *mover);
// Start to bring one; `started`: as of `start_in`. False: an exception is set.
bool start_held(Mover *mover, Held *held, bool is_tentative, int *started);
// Take the first of those that a plan lets leave once they are copied; null: there is none.
Held *take_going(HeldOrder &order);
// Carry out the due moves of a plan; the GIL and the runtime's lock are held. False: an exception
// is set.
bool leave_planned(Mover *mover);
bool come_planned(Mover *mover);
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
// Start to bring a storage's bytes. Here and below the GIL is held; takes the runtime's lock.
// False: an exception is set.
bool begin_bringing(Held *held);
// Bring a storage's bytes to this thread's stream.
bool bring_held(Held *held);
// Start to bring what is used after a storage, as far as there is room.
bool bring_next(Held *held);
// Forget a storage that is on the device, or dead. The GIL and the runtime's lock are held. False:
// an operator runs with it.
bool forget_held(Mover *mover, Held *held);

} // namespace swapkit

#endif
