// held.hpp - storages that the program holds itself (weights), whose bytes leave between two uses.
//
// A held storage keeps its identity: the program's tensors view it all the time. While its bytes
// are away it has no memory, and code that reads its address gets torch's error. Its tensors carry
// one more dispatch key (`trap.cpp`), which their views inherit: an operator with such an operand
// brings the bytes back first, and pins them while it runs.
//
// The bytes move as those of saved tensors do, in a group (`saved_tensors.hpp`) that is on no
// agenda: operators bring it, and a rescue lets it go, farthest next use first, by the order of
// uses in the last step. A storage is held that only known tensors view. From then on all views
// have the key, and reading the address raises torch's error while no operator runs with the
// storage. Tensors get the key some time before (they are *watched*): only of those is known which
// operators run with them, so that memory can be given up where it runs out, in an operator.
//
// `held_lock` guards what operators read and write here, on any thread, without the GIL; no other
// lock is taken while it is held. All else needs the GIL and the runtime's lock.
#ifndef SWAPKIT_HELD_HPP
#define SWAPKIT_HELD_HPP

#include "python/python.hpp"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace swapkit {

struct Group;
struct Held;
struct Mover;

// What a plan lets happen at a use: the storage leaves once so many operators in a row have used it
// (0: it stays); others come, others must be gone by then, and others come behind the operator.
struct HeldMoves {
    std::size_t leaves;
    std::vector<Held *> comes, gone, follows;
};

// The held storages of a mover, and in which order operators use them.
struct HeldOrder {
    std::vector<Held *> all;
    // Uses in this step, and in the one before or, as planned, in each.
    std::vector<Held *> now, last;
    std::vector<char> here;   // whether the storage of each use in `last` is
    std::vector<Held *> idle; // not used in the one before
    std::size_t at = 0;       // the latest use, in `last`
    // For each use in `last`; empty: no plan decides, and a rescue does.
    std::vector<HeldMoves> plan;
    std::size_t done = 0;                         // uses whose moves are due, or were
    std::vector<Held *> leaving, coming, awaited; // due moves
    std::vector<Held *> following;                // that come as soon as the operator has run
    // That come at an event of the plan's step (`plan_cursor.cpp`), in order; some have.
    std::vector<std::pair<std::int64_t, Held *>> events;
    std::size_t events_done = 0;
    Held *lingering = nullptr; // leaves when as many operators more
    std::size_t lingers = 0;   // have used it
    // Those that leave, once they are copied out, if this is still their latest use by then.
    std::deque<std::pair<Held *, std::uint64_t>> going;
    std::uint64_t clock = 0;      // uses so far
    std::uint64_t late = 0;       // uses that waited for the bytes
    std::deque<Held *> written;   // in this order; some have been copied since
    std::deque<Held *> copying;   // out, while they stay
    std::size_t behind_bytes = 0; // so many may be copied while they stay
    bool is_over = false;         // the session has ended
};

// Operands of one operator, or of one compiled region, that are held. A region uses its operands
// again as it ends. Any thread, with or without the GIL.
class HeldUses : Unmovable {
  public:
    explicit HeldUses(bool is_region = false) : is_region_(is_region) {}
    ~HeldUses();
    [[nodiscard]] bool is_empty() const { return uses_.empty(); }
    // Pin the storage of an operand, if it is held. `writes`: the operator changes it;
    // `is_expected`: it is a use that a step expects.
    void add(const c10::StorageImpl *storage, bool writes, bool is_expected = true);
    // Pin that of an operand of an operator that runs again: no use that a step expects.
    void add_again(const c10::TensorImpl &operand);
    // Bring the bytes of all of them. Throws Python's error if that fails.
    void bring();
    // Let them stay from now on: the operator uses them after it has returned.
    void keep();
    // Begin the moves of a plan that wait for the operator, now that it has run: copies wait for
    // the work that is queued so far, and there may be much before the next use. Throws Python's
    // error if that fails.
    void finish();

  private:
    // The lock is held; `held`: the storage's, or null.
    void pin(const c10::StorageImpl *storage, Held *held);
    // The same. True: the session of one of them has ended.
    bool unpin_all();
    void unpin();

    c10::SmallVector<Held *, 8> uses_;
    c10::SmallVector<const c10::StorageImpl *, 4> watched_;
    bool is_late_ = false, is_region_;
    bool is_due_ = false; // moves of a plan are
};

// An operator with held operands, or a compiled region, that runs on this thread. What its kernels
// call meanwhile, in several parts, are no uses that a recording knows.
class Running : Unmovable {
  public:
    explicit Running(bool is_counted);
    ~Running();

  private:
    bool is_counted_;
};

// Return the key of tensors whose storages are held; `Undefined`: none was. Any thread.
c10::DispatchKey held_key();
// Register the key's kernel. False: an exception is set, other libraries use all of the keys.
bool trap_register();

// Let operators on this thread pass by the key's kernel, or not. Return whether they did.
bool trap_exclude(bool is_excluded);

// Return whether a tensor's storage may be held. Any thread, without the GIL.
inline bool is_trapped(const c10::TensorImpl &tensor) {
    c10::DispatchKey key = held_key();
    return key != c10::DispatchKey::Undefined && tensor.key_set().has(key);
}

// Return whether a storage, by its address, may leave now or later: 0 or 1. Any thread.
int is_sealed(std::size_t storage);

// Return how many bytes an operator on lists should use at once, judging by one of their tensors;
// 0: its storage is not held.
std::size_t held_most_bytes(const c10::TensorImpl &tensor);

// A part of a file; without a path: none.
struct FilePart {
    std::string path;
    std::uint64_t offset = 0;
};

// Return whether copying a tensor into another one fills the storage of that one, which may be
// held.
bool is_filled_by(const c10::TensorImpl &target, const c10::TensorImpl &source);
// Return the part of a file that is mapped at a tensor's bytes. Any thread, without the GIL.
FilePart file_of(c10::TensorImpl &tensor);
// Note that a tensor's storage has been filled with it. Any thread, without the GIL.
void held_loaded(const c10::TensorImpl &tensor, FilePart part);
// The same two for Python: a path and an offset, or None. None, false: an exception is set.
Ref<> held_file(Mover *mover, PyObject *tensor);
bool note_file(Mover *mover, PyObject *tensor, PyObject *path, std::uint64_t offset);
// Let the copy of a new native group be the part of the file that its storage was filled with.
void lend_file(const Group *group);

// Note that a handle of a saved tensor has an alias of a held storage. Return whether it is one.
bool held_aliased(const c10::TensorImpl *alias);
// Note that such a handle has been freed.
void held_unaliased(const c10::TensorImpl *alias);

// Let a tensor of at least so many bytes carry the key: its storage may be held later. 0: it is not
// plain memory that a budget counts, or another session holds it; -1: an exception is set.
int watch(Mover *mover, PyObject *tensor, std::size_t min_bytes);
// Note that code may know the address of a tensor's bytes: if it carries the key, its storage is
// not held before the session ends. False: an exception is set.
bool expose(Mover *mover, PyObject *tensor);
// Hold the storage of a tensor that carries the key, with a placement's terms. Also in the middle
// of operators. 0: one runs with it, its address is known, or another session holds it; -1: an
// exception is set.
int hold(Mover *mover, PyObject *tensor, PyObject *placement);
// Begin to let them leave: those that nothing else holds. The others are forgotten.
void held_begin(Mover *mover);
// Call a function of Python while the bytes of two storages, by their addresses, are here; 0: no
// storage. It changes the bytes of the second one. Null: an exception is set.
PyObject *run_with(Mover *mover, std::size_t read, std::size_t written, PyObject *function);
// Take the key from a tensor whose storage is not held any more. False: an exception is set.
bool unhold(Mover *mover, PyObject *tensor);
// Let held storages go until so many bytes are free. `spares`: not those that are used soon. Return
// the freed bytes. None: an exception is set.
Ref<> held_free(Mover *mover, unsigned long long needed_bytes, bool spares);
// Note that a step has ended: the next one is expected to use them in the same order. False: an
// exception is set.
bool held_end_step(Mover *mover);
// Let a plan decide, which expects uses in an order: a list of a storage's address, whether it
// leaves then, and lists of those that come, and that must be gone. An empty list: no plan does.
// False: an exception is set.
bool held_plan(Mover *mover, PyObject *uses, PyObject *events);
// Return whether a plan lets storages come at an event that is not later. The GIL is held.
bool held_comes(const HeldOrder &order, std::int64_t event);
// Start to bring them. False: an exception is set.
bool held_bring(Mover *mover, std::int64_t event);
// Return the bytes of held storages that have no memory, and the addresses of the others' memory.
Ref<> held_memory(Mover *mover);
// Bring all of them back as far as there is room, and hold them no more; operators bring the
// others. False: an exception is set.
bool held_end(Mover *mover);
// Return the bytes of held storages, those of them that are here, that cannot leave, and that
// compiled regions use now, and the number of uses that found the bytes away.
Ref<> held_bytes(Mover *mover);

} // namespace swapkit

#endif
