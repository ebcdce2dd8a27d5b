// saved_tensors.hpp - saved tensors, and the storages under them; Python's types for them.
//
// A *handle* (`SavedTensor`) stands for one saved tensor in autograd's graph; its *group*
// (`StorageGroup`) stands for the storage, at one version, that all saved views of it share: one
// copy, one transfer, whatever the number of views. The handle keeps an alias of the tensor
// (`detach()`: same storage, same version counter, not the tensor itself, which would tie the graph
// into a cycle). When the group's memory is given up the alias gets an empty storage and stays as a
// tracker of the version, so that a change in place is noticed in every state; when the bytes are
// back it gets the new one. A group whose saved views cover less than half of their storage moves
// only the part that they cover: a slice of a large tensor then gives up the whole tensor for the
// price of the slice.
//
// Autograd owns the handles, handles own their group, groups own their mover, and nothing else owns
// any of them: when a graph node runs or a graph is dropped, device and host memory go with it.
// All of it needs the interpreter, and a group what guards the groups: the runtime's lock, which a
// hook takes and everybody else has. Where the interpreter is let go of, a handle or a group that
// nobody holds may go.
#ifndef SWAPKIT_SAVED_TENSORS_HPP
#define SWAPKIT_SAVED_TENSORS_HPP

#include "python/links.hpp"

#include "memory/storages.hpp"
#include "saved/tensors.hpp"

#include <cstddef>
#include <cstdint>

namespace swapkit {

// ---- a scope's choice ---------------------------------------------------------------------------

// `pass`: nothing is moved but what is marked (`storage_choices.hpp`).
// As `swapkit.ir.plans.Action`; plans have its numbers in their tables.
// NOLINTNEXTLINE(performance-enum-size)
enum class Action : std::int64_t { keep, swap, recompute, automatic, pass };

constexpr std::int64_t no_prefetch = -1; // as early as memory allows; else a distance in operators

struct Terms {
    PyObject *choice; // owned by whoever has the terms: `Choice`, of which these are the fields
    std::size_t min_bytes;
    std::int64_t prefetch;
    Action action;
    sk_tier tier;
    bool spares; // what is recomputed inside keeps what it is handed
};

// ---- when groups leave and come back (`agenda.hpp`) ---------------------------------------------

// What a number counts: events of a plan's step, or else operators of a thread.
constexpr std::uint64_t plan_clock = 0;

struct Point {
    std::uint64_t clock;
    std::int64_t number; // rising; operators of backward are negative
    std::uint64_t order; // among what is due at that number
};

enum class CopyAt : std::uint8_t {
    never,     // it stays
    once,      // now; of a part, when nothing saves it once more
    exclusive, // as soon as nobody else may write to it
    pressure   // when memory fills up
};
enum class ReleaseAt : std::uint8_t { copied, pressure };
enum class ComeAt : std::uint8_t { room, point, use };

constexpr std::int64_t no_event = -1;

struct Departure {
    CopyAt copy;
    ReleaseAt release;
    bool has_end = false; // a point by which its memory has gone
    Point end = {};
    std::int64_t last_save = no_event; // that a plan knows: no release before
};

struct Arrival {
    ComeAt when;
    Point at; // of `use` the clock alone
};

// What a group that leaves waits for.
enum class Line : std::uint8_t {
    none,
    ahead,   // to be copied when memory fills up;
    copying, // that copy
    starts,  // to be copied;
    leaves,  // that copy; it is released then
    bound    // to be released: at a point, or where memory is asked for
};
inline constexpr std::size_t line_count = 6;

// ---- handles and groups -------------------------------------------------------------------------

struct Group;
struct Mover;
struct Follower;
struct Packer;
struct Recipe;

struct Handle {
    PyObject ob_base;
    PyObject *weakrefs;
    c10::TensorImpl *alias;  // owned
    Group *group;            // owned; null: it stays where it is, and only its version counts
    Packer *teller;          // owned: who is told of its use in a region's place; null: nobody
    Handle *previous, *next; // of the group's
    std::int64_t shift;      // of the alias's offset, in elements
    std::uint32_t version;   // when it was saved
    bool is_stripped;
};

// Which storage, at which version.
struct Key {
    c10::StorageImpl *storage;
    std::uint32_t version;
    bool operator==(const Key &) const = default;
};

// What a recipe is to a group that no plan has named.
enum class Standby : std::uint8_t {
    none,   // a plan has
    region, // a user's region computes it again (`regions.hpp`),
    held,   // and keeps it until its end
    // In case memory runs out (`standby.hpp`):
    captured, // how its bytes are computed, as of any other recipe: nobody has saved them
    spare     // autograd has saved them, and they are there
};

struct Group {
    PyObject ob_base;
    PyObject *weakrefs;
    Mover *mover; // owned
    Terms terms;
    c10::StorageImpl *storage; // held; null while it is given up
    // The storage that was given up while others still held it, referred to weakly: its memory can
    // go, but no other object gets its address.
    c10::StorageImpl *weak;
    Key key;
    std::size_t nbytes;
    Span cover;              // of the saved views, in the first storage
    std::size_t part_bytes;  // where in the first storage what is copied begins
    std::size_t shift_bytes; // where in it the present storage begins
    sk_group *native;        // owned; null before the first copy
    std::uint64_t
        copied_from;      // the memory (`copy_owners.hpp`) that the copy is of, or came back to
    Recipe *recipe;       // owned: how its bytes are computed again (`recipes.hpp`); null: not
    std::uint32_t result; // which of the recipe's it is
    Standby standby;
    std::uint32_t depth; // among regions inside each other, of the one that it is of; 0: of none
    PyObject *digest;    // owned: of its bytes when a rescue dropped them; null: none did
    const sk_group_state *state_at;
    Handle *handles; // borrowed; they leave when they go
    std::size_t nhandles;
    std::uint64_t serial; // in the order in which groups were saved; 0: not yet
    Departure departure;
    Arrival arrival;
    Line line;
    std::uint64_t turn;      // in it
    std::size_t stash_bytes; // of these, what keeps others from being sent
    std::uint64_t thread;    // whose operators it is timed by (`prefetch.hpp`); 0: none
    std::int64_t operation;  // the last of them that saved it
    std::int64_t stream;     // in whose order its bytes are valid
    char is_moved;           // the storage is one of ours, which the bytes came back to
    char is_aside;           // the storage was set aside, and may be there or not
    std::uint32_t followed;  // its number in the plan, from 1; 0: it is in none
    std::uint32_t tag;       // the site: module,
    std::uint32_t index;     // and number within its call
};

extern PyTypeObject handle_type, group_type;

// A handle of a tensor, which is kept. `itself`: the tensor, not an alias. Null: an exception is
// set.
Handle *handle_keep(PyObject *tensor, bool itself);
// A handle of a plain tensor, which the group (if not null) gets as one more view; if the group has
// no storage, nor has the handle. Null: an exception is set.
Handle *handle_new(c10::TensorImpl *tensor, Group *group);
// Whether it is as it was saved.
bool handle_is_intact(const Handle *handle);
// False: it was changed in place after it was saved, and that is raised.
bool handle_check(Handle *handle);
// View the group's storage, if it is there, as the saved tensor did the one it was saved from.
void handle_fill(Handle *handle);

// The group of a storage that is on the device.
Group *group_new(Mover *mover, const Terms &terms, Key key);
// The same of one that it does not keep: a recipe makes its bytes again.
Group *group_new_recomputed(Mover *mover, const Terms &terms, Key key);
sk_group_state group_state(const Group *group);
// Whether the saved views cover too little of the storage for all of it to move.
bool group_is_partial(const Group *group);
// Whether the storage is on the device, with all that the saved views see.
bool group_has_storage(const Group *group);
// Whether the storage can be dropped, and frees its memory then.
bool group_is_exclusive(const Group *group);
// Whether the copy, if there is one, has what a tensor views: these bytes of the present storage.
bool group_can_take(const Group *group, const c10::TensorImpl *tensor, Span span);
// Note that a saved tensor views these bytes of the present storage.
void group_cover(Group *group, Span span);
// Let a group whose bytes can be computed again have no copy, in whatever state that is.
void group_drop_copy(Group *group);
// Let a resident group have no copy again, nor the place for one.
void group_end_copy(Group *group);
// Let a copy go that is not of the bytes that the storage has now.
void group_forget_copy(Group *group);
// Let go of the storage; the copy takes its place, unless others keep the storage alive.
void group_strip(Group *group);
// Take the storage back if somebody else kept it alive, or nobody took what was set aside; return
// whether it is there.
bool group_revive(Group *group);
// Take a storage that holds the bytes again, and the caller's hold on it. Of one that was computed
// again it is as the first was.
void group_restore(Group *group, c10::StorageImpl *storage);

} // namespace swapkit

#endif
