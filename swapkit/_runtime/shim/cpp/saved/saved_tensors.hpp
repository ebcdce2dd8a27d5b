// saved_tensors.hpp - saved tensors and the storages under them, and their Python types.
//
// A *handle* (`SavedTensor`) stands for one saved tensor in autograd's graph. Its *group*
// (`StorageGroup`) stands for the storage, at one version, that all saved views of it share: one
// copy and one transfer for any number of views. The handle keeps an alias of the tensor
// (`detach()`: same storage, same version counter; the tensor itself would make the graph a
// reference cycle). As long as the program holds a leaf, its handle returns the leaf itself, as
// autograd would. When the group's memory is released, the alias gets an empty storage and still
// tracks the version, so that an in-place change is detected in every state. When the bytes are
// back, the alias gets the new storage. A group whose saved views cover less than half of their
// storage moves only the part that they cover: a slice of a large tensor then frees the whole
// tensor for the price of the slice.
//
// Autograd owns the handles, handles own their group, groups own their mover, and nothing else owns
// any of them: when a graph node runs or a graph is dropped, its device and host memory are freed.
// All of this needs the GIL. Groups also need the runtime's lock, which guards them: a hook takes
// the lock, all other callers hold it. While the GIL is released, any handle or group without a
// reference held here may be destroyed.
#ifndef SWAPKIT_SAVED_TENSORS_HPP
#define SWAPKIT_SAVED_TENSORS_HPP

#include "python/links.hpp"
#include "python/types.hpp"

#include "memory/descriptions.hpp"
#include "memory/storages.hpp"
#include "saved/tensors.hpp"

#include <cstddef>
#include <cstdint>

namespace swapkit {

// ---- a scope's placement ------------------------------------------------------------------------

// `pass`: only marked storages are moved (`storage_choices.hpp`). The values are those of
// `swapkit.ir.plans.Action`; the tables of plans contain them.
// NOLINTNEXTLINE(performance-enum-size)
enum class Action : std::int64_t { keep, swap, recompute, automatic, pass };

constexpr std::int64_t no_prefetch = -1; // as early as memory allows; else a distance in operators

struct Terms {
    PyObject *placement; // owned by the holder of the terms: the `Placement` with these fields
    std::size_t min_bytes;
    std::int64_t prefetch;
    Action action;
    sk_tier tier;
    bool spares; // the inputs of a recomputed region inside do not move
};

// ---- when groups leave and come back (`agenda.hpp`) ---------------------------------------------

// The clock of a point: events of a plan's step, or operators of a thread.
constexpr std::uint64_t plan_clock = 0;

struct Point {
    std::uint64_t clock;
    std::int64_t number; // increases; operators of backward are negative
    std::uint64_t order; // among the points at that number
};

enum class CopyAt : std::uint8_t {
    never,     // the group stays
    once,      // now; a part, after its last save
    exclusive, // as soon as no other code may write to it
    pressure   // when memory fills up
};
enum class ReleaseAt : std::uint8_t { copied, pressure };
enum class ComeAt : std::uint8_t { room, point, use };

constexpr std::int64_t no_event = -1;

struct Departure {
    CopyAt copy;
    ReleaseAt release;
    bool has_end = false; // there is a point by which its memory is released
    Point end = {};
    std::int64_t last_save = no_event; // the last one in a plan: no release before it
};

struct Arrival {
    ComeAt when;
    Point at; // for `use` only the clock
};

// The line on which a leaving group waits.
enum class Line : std::uint8_t {
    none,
    ahead,   // to be copied when memory fills up;
    copying, // for that copy to end
    starts,  // to be copied;
    leaves,  // for that copy to end; it is released then
    bound    // to be released: at a point, or when memory is requested
};
inline constexpr std::size_t line_count = 6;

// ---- handles and groups -------------------------------------------------------------------------

struct Group;
struct Mover;
struct Follower;
struct Packer;
struct Recipe;
struct Weight;

// The version of a wrapper (`saved/taken_apart.py`) at its save. A change in place of the wrapper
// does not count as a change of the tensors inside it: torch runs it there below the kernels that
// count.
struct Watch {
    c10::VariableVersion counter;
    std::uint32_t version;
    bool is_intact() const { return counter.current_version() == version; }
};

struct Handle {
    PyObject ob_base;
    PyObject *weakrefs;
    c10::TensorImpl *alias;  // owned
    c10::TensorImpl *leaf;   // weak: the saved tensor, if it is a leaf in a group; null: none
    Group *group;            // owned; null: the tensor stays, and only its version counts
    Packer *teller;          // owned: notified of its use by a region; null: none
    Weight *weight;          // owned: read anew (`weights.hpp`); null: none
    Watch *watch;            // owned: of the wrapper around the saved tensor; null: none
    Handle *previous, *next; // in the group's list
    std::int64_t shift;      // of the alias's offset, in elements
    std::uint32_t version;   // at the save
    bool is_stripped;
    bool is_of_held; // the alias is one of a held storage (`held/held.hpp`)
};

// A storage at one version.
struct Key {
    c10::StorageImpl *storage;
    std::uint32_t version;
    bool operator==(const Key &) const = default;
};

// The role of the recipe of a group that no plan names.
enum class Standby : std::uint8_t {
    none,   // a plan names the group
    region, // a user's region recomputes it (`regions.hpp`),
    held,   // and holds it until the region ends
    // If memory runs out (`standby.hpp`):
    captured, // it has a recipe like any other; autograd has not saved it
    spare     // autograd has saved it, and its bytes are on the device
};

struct Group {
    PyObject ob_base;
    PyObject *weakrefs;
    Mover *mover; // owned
    Terms terms;
    c10::StorageImpl *storage; // owned; null while it is released
    // A weak reference to the storage that was released while other code held it: its memory can be
    // freed, but no other object gets its address.
    c10::StorageImpl *weak;
    Key key;
    std::size_t nbytes;
    Span cover;                // the part of the first storage that the saved views cover
    std::size_t part_bytes;    // where the copied part begins in the first storage
    std::size_t shift_bytes;   // where the current storage begins in the first
    sk_group *native;          // owned; null before the first copy
    Description *description;  // owned: of the storage that was copied; null: it has none
    std::uint64_t copied_from; // the memory (`copy_owners.hpp`) that was copied or copied back to
    Recipe *recipe;            // owned: recomputes its bytes (`recipes.hpp`); null: none
    std::uint32_t result;      // its index in the recipe's results
    Standby standby;
    std::uint32_t depth; // nesting depth of its region; 0: it is in none
    PyObject *digest;    // owned: of its bytes when a rescue dropped them; null: none has
    const sk_group_state *state_at;
    Handle *handles; // borrowed; a handle leaves when it is destroyed
    std::size_t nhandles;
    std::uint64_t serial; // the order of the groups' first saves; 0: not saved yet
    Departure departure;
    Arrival arrival;
    Line line;
    std::uint64_t turn;      // its position on the line
    std::size_t stash_bytes; // its bytes on the stash (`agenda.cpp`)
    std::uint64_t thread;    // the thread whose operators time it (`prefetch.hpp`); 0: none
    std::int64_t operation;  // the last operator that saved it
    std::int64_t stream;     // the stream in whose order its bytes are valid
    char is_held;            // the program holds the storage, which is empty while it is away
    char is_moved;           // the storage is ours: its bytes were brought back
    char is_reclaimable;     // the storage may have been taken (`reclaimable.hpp`)
    char is_watched;         // a wrapper was saved that has the storage inside
    std::uint32_t followed;  // its number in the plan, from 1; 0: it is in none
    std::uint32_t tag;       // the site: module,
    std::uint32_t index;     // and index within the module's call
};

extern Type handle_type, group_type;

// Return an object that autograd keeps as a handle; null: it is none.
inline Handle *as_handle(PyObject *packed) {
    return packed != nullptr && Py_TYPE(packed) == &handle_type ? reinterpret_cast<Handle *>(packed)
                                                                : nullptr;
}

// Return a new handle of a tensor that stays. `itself`: of the tensor, not of an alias. Null: an
// exception is set.
Handle *handle_keep(PyObject *tensor, bool itself);
// The same for a tensor that autograd saves: of a leaf itself. A result that an operator has just
// made, below autograd, is no such tensor: it is not in a graph yet.
Handle *handle_saved(PyObject *tensor);
// Return a new handle of a plain tensor, as one more view of the group (if not null). If the group
// has no storage, neither has the handle. Null: an exception is set.
Handle *handle_new(c10::TensorImpl *tensor, Group *group);
// Return a new handle of a plain tensor inside a wrapper, which stays. Null: an exception is set.
Handle *handle_inside(c10::TensorImpl *tensor, c10::TensorImpl *wrapper);
// Give up a handle's alias of a held storage: it gets another storage, or is freed.
void handle_leave_held(Handle *handle);
// Note that the saved tensor of a handle is inside a wrapper, too.
void handle_watch(Handle *handle, const Watch &watch);
// Let a handle in a group return a tensor, if it is a leaf, for as long as other code holds it.
void handle_follow(Handle *handle, c10::TensorImpl *tensor);
// Return the leaf of a handle, owned by the caller. Null: it has none, it was changed in place, or
// nobody holds it any more.
c10::TensorImpl *handle_leaf(const Handle *handle);
// Return whether the tensor, or the wrapper around it, has its saved version.
bool handle_is_intact(const Handle *handle);
// Raise if the tensor was changed in place after it was saved. False: an exception is set.
bool handle_check(Handle *handle);
// Return whether a tensor was changed in place that is inside an unchanged wrapper. Torch does not
// notice that, and reads the changed bytes.
bool handle_has_changed_inside(const Handle *handle);
// Raise if the bytes of such a handle are those of before the change. False: an exception is set.
bool handle_refuse_moved(Handle *handle);
// View the group's storage, if there is one, as the saved tensor viewed its original storage.
void handle_fill(Handle *handle);

// Return whether any group exists. On any thread, without the GIL.
bool is_any_group();
// Make the group of a storage that is on the device.
Group *group_new(Mover *mover, const Terms &terms, Key key);
// Make a group that does not keep its storage: a recipe recomputes the bytes.
Group *group_new_recomputed(Mover *mover, const Terms &terms, Key key);
// Separate such a group from the storage that its operator has written to: it gets `nbytes` of its
// own.
void group_part(Group *group, std::size_t nbytes);
sk_group_state group_state(const Group *group);
// Return whether the saved views cover too little of the storage to move all of it.
bool group_is_partial(const Group *group);
// Return whether the storage is on the device, with all bytes that the saved views cover.
bool group_has_storage(const Group *group);
// Return whether dropping the storage is possible and frees its memory.
bool group_is_exclusive(const Group *group);
// The wrapper around the tensor that this thread packs; null: none.
extern thread_local const Watch *watch_around;
// Return whether the copy, if there is one, has the bytes that a tensor views: a span of the
// current storage.
bool group_can_take(const Group *group, const c10::TensorImpl *tensor, Span span);
// Note that a saved tensor views a span of the current storage.
void group_cover(Group *group, Span span);
// Drop the copy, in any state, of a group whose bytes can be recomputed.
void group_drop_copy(Group *group);
// Measure a group without a copy. The program may have resized its storage, or taken its memory
// away when the last copy was dropped.
void group_measure(Group *group);
// Drop the place for a copy, or a copy that no longer matches the storage's bytes.
void group_forget_copy(Group *group);
// Drop the storage. The copy replaces it, unless other references keep the storage alive.
void group_strip(Group *group);
// Take the storage back if other references kept it alive, or if it is reclaimable and no rescue
// took it. Return whether the group has its storage.
bool group_revive(Group *group);
// Give the program's storage the memory that was restored to a group which is held.
void group_arrive(Group *group);
// Give a group a storage that holds its bytes again, and take over the caller's reference. A
// recomputed storage has the layout of the first one.
void group_restore(Group *group, c10::StorageImpl *storage);

} // namespace swapkit

#endif
