// regions.cpp - the hooks of a region, and its groups.
#include "recompute/regions.hpp"

#include "memory/streams.hpp"
#include "recompute/capturing.hpp"
#include "recompute/recomputed.hpp"
#include "running/operator_clock.hpp"
#include "saved/storage_choices.hpp"
#include "saved/weights.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace swapkit {

namespace {

constexpr std::size_t least_sweep = 64;

// A storage that a region keeps but has not made.
struct Kept {
    std::size_t holds; // the region's references
    bool is_chosen;    // the user chose to keep it
    bool is_grouped;   // a group also holds it
};

using Made = std::unordered_map<Key, Ref<Group>, KeyHash>;

struct Body {
    std::shared_ptr<Run> run;
    std::unordered_set<const Named *> chosen;
    std::unordered_set<const c10::StorageImpl *> inputs; // the caller holds these
    Made made;
    std::vector<Refill> refills; // the latest writes, in order
    std::size_t next_sweep = least_sweep;
    std::unordered_map<c10::StorageImpl *, Kept> kept; // weak references
};

} // namespace

struct Region {
    PyObject ob_base;
    Packer *kept;     // owned: the hooks for what is kept
    PyObject *around; // owned: the enclosing pack hook; null: there is none
    PyObject *others; // owned: pack hook for tensors that are no inputs; null: keep them
    Region *outer;    // owned while it is open
    Body *body;
    char is_open, holds;
    char is_inert, skips_backward; // as in `Packer`; always false
};

namespace {

thread_local Region *innermost = nullptr;

bool is_gone(const Group *group) {
    bool is_there = group->weak != nullptr && c10::raw::intrusive_ptr::use_count(group->weak) > 0;
    return group->nhandles == 0 && !is_there && group->storage == nullptr;
}

// Whether a group's bytes are in this storage, or were when the operator had run. Does not use the
// key: recomputed bytes are in another storage, and the old address may have been reused.
bool is_of(const c10::StorageImpl *storage, const Group *group) {
    return storage == (group->storage != nullptr ? group->storage : group->weak);
}

// Drop groups that can no longer be saved. Last, since this may end other groups and run Python.
void sweep(Body &body) {
    std::vector<Ref<Group>> gone;
    for (auto each = body.made.begin(); each != body.made.end();) {
        if (is_gone(each->second.get())) {
            gone.push_back(std::move(each->second));
            each = body.made.erase(each);
        } else {
            ++each;
        }
    }
    body.next_sweep = std::max(least_sweep, 2 * body.made.size());
}

Kept &note(Region *region, c10::StorageImpl *storage) {
    auto [found, is_new] = region->body->kept.try_emplace(storage, Kept{0, false, false});
    if (is_new) {
        c10::raw::intrusive_ptr::make_weak(storage);
    }
    return found->second;
}

// Count the bytes that only the region keeps without a user's choice, and drop the records of them.
std::size_t count_kept(Body &body) {
    std::size_t nbytes = 0;
    for (auto [storage, kept] : std::exchange(body.kept, {})) {
        bool is_there = c10::raw::intrusive_ptr::use_count(storage) > 0;
        std::size_t ours = kept.holds + (kept.is_grouped ? 1 : 0);
        if (is_there && !kept.is_chosen && count_holders(storage) <= ours) {
            nbytes += storage->nbytes();
        }
        c10::raw::weak_intrusive_ptr::decref(storage);
    }
    return nbytes;
}

bool has_refills(const Region *region) {
    while (region != nullptr && region->body->refills.empty()) {
        region = region->outer;
    }
    return region != nullptr;
}

bool is_kept_here(const Region *region) {
    Action action = region->kept->terms.action;
    return action == Action::keep || action == Action::pass;
}

// Whether a tensor is a weight or a view of one: it stays where it is, and is in no plan.
bool is_weight(c10::TensorImpl *impl) {
    return gathers_gradients(impl) || (views_leaf(impl) && views_parameter(impl));
}

// Pack a tensor with a pack hook. If the hook belongs to those by which a session or a recorder
// sees events, make them the teller: they must see the use, but autograd calls the region's unpack.
PyObject *pack_by(const Region *region, PyObject *pack, PyObject *tensor) {
    Ref<> packed = Ref<>::steal(PyObject_CallOneArg(pack, tensor));
    Packer *teller = region->others == nullptr ? nullptr : packer_of(region->others);
    Handle *handle = as_handle(packed.get());
    if (handle != nullptr && teller != nullptr && packer_of(pack) == teller) {
        Py_INCREF(teller);
        handle->teller = teller;
    }
    return packed.release();
}

// Pack a tensor that no region has made.
PyObject *pack_other(Region *region, PyObject *tensor, c10::TensorImpl *impl, bool is_input) {
    if (region->others != nullptr && is_weight(impl)) {
        return as_object(handle_saved(tensor));
    }
    if (is_input && region->around != nullptr) {
        return pack_by(region, region->around, tensor);
    }
    Kept *kept = nullptr;
    if (!is_input && region->is_open != 0 && !gathers_gradients(impl)) {
        kept = &note(region, impl->unsafe_storage().unsafeGetStorageImpl());
        kept->holds++;
    }
    if (region->others != nullptr) {
        c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
        PyObject *packed = pack_by(region, region->others, tensor);
        const Handle *handle = as_handle(packed);
        if (kept != nullptr && handle != nullptr && handle->group != nullptr) {
            note(region, storage).is_grouped = true;
        }
        return packed;
    }
    if (is_input || is_kept_here(region)) {
        return as_object(handle_saved(tensor));
    }
    return call_method<"pack">(as_object(region->kept), tensor).release();
}

// A handle for a tensor that was made in a region.
Ref<> handle_made(Region *region, c10::TensorImpl *impl, Group *group) {
    bool is_held = region->holds != 0 && group->recipe != nullptr && group->storage == nullptr;
    if (is_held && group_revive(group)) {
        group->standby = Standby::held;
        if (group->terms.action == Action::automatic) {
            enroll_again(group->mover, group); // a rescue may move it until the region ends
        }
    }
    return new_handle(impl, group);
}

// Pack a tensor that an open region has made. None without an exception: it has not.
Ref<> pack_made(Region *region, c10::TensorImpl *impl, Key key) {
    if (region->is_open == 0) {
        return {};
    }
    Locked lock(region->kept->mover);
    Group *group = lock ? region_find(region, key) : nullptr;
    if (group != nullptr) {
        return handle_made(region, impl, group);
    }
    Span span = {};
    Refill *refill =
        lock && look(*impl, 0, &span) != nullptr ? region_refilled(region, impl, span) : nullptr;
    return refill == nullptr ? Ref<>() : refilled_handle(*refill, impl, region->holds != 0);
}

PyObject *region_pack(Region *region, PyObject *tensor) {
    if (!raise_interruption()) {
        return nullptr;
    }
    auto own = Ref<Region>::share(region);
    OwnOperators ours;
    c10::TensorImpl *impl = nullptr;
    if (as_object(Py_TYPE(tensor)) != links.tensor) {
        return as_object(handle_saved(tensor));
    }
    if (!impl_of(tensor, &impl)) {
        return nullptr;
    }
    Key key = key_of(*impl);
    if (key.storage == nullptr) {
        return as_object(handle_saved(tensor));
    }
    Ref<> packed = pack_made(region, impl, key);
    if (!packed && PyErr_Occurred() == nullptr && !gathers_gradients(impl)) {
        packed = Ref<>::steal(as_object(handle_reading(impl)));
    }
    if (packed || PyErr_Occurred() != nullptr) {
        return packed.release();
    }
    return pack_other(region, tensor, impl, region->body->inputs.contains(key.storage));
}

// Separate a region's group from the storage that escapes, and from its version counter: later
// changes there must not affect the group.
void part(Group *group) {
    if (group->weak != nullptr) {
        c10::raw::weak_intrusive_ptr::decref(std::exchange(group->weak, nullptr));
    }
    c10::VariableVersion version(group->key.version);
    for (Handle *handle = group->handles; handle != nullptr; handle = handle->next) {
        if (handle_is_intact(handle)) {
            handle->alias->set_version_counter(version);
        }
    }
}

struct Sums {
    std::size_t kept_bytes, dropped_bytes, moved; // moved: groups that a rescue has moved
};

// At the end of a region that holds: release a group and recompute it later, or keep it and drop
// its recipe. Always keep a group that a rescue has moved: its bytes have not been checked since.
void settle_held(Group *group, bool drops, Sums *sums) {
    bool is_moved = group->digest != nullptr || group->native != nullptr;
    sums->moved += is_moved ? 1 : 0;
    if (group->standby != Standby::held || group->recipe == nullptr) {
        return;
    }
    group->standby = Standby::region;
    if (drops && !is_moved) {
        forget_computed(group->mover, group);
        return;
    }
    recipe_leave(group);
    if (group->storage != nullptr) {
        enroll_again(group->mover, group);
    }
}

void count_group(const Group *group, Sums *sums) {
    if (group->recipe != nullptr) {
        sums->dropped_bytes += group->nhandles > 0 ? group->nbytes : 0;
    } else if (group_is_exclusive(group)) { // its recipe was settled
        sums->kept_bytes += group->nbytes;
    }
}

// End a region: settle its groups, and pass on those the outer region may need. The lock is held.
Sums end(Region *region, bool drops) {
    Body &body = *region->body;
    sweep(body);
    Sums sums = {.kept_bytes = count_kept(body), .dropped_bytes = 0, .moved = 0};
    Region *outer = region->outer;
    bool is_held = outer != nullptr && outer->holds != 0 && !drops;
    for (auto &[key, group] : std::exchange(body.made, {})) {
        count_group(group.get(), &sums);
        if (!is_held) {
            settle_held(group.get(), drops, &sums);
        }
        if (group->recipe == nullptr) {
            continue;
        }
        if (outer == nullptr) {
            part(group.get());
        } else if (is_of(key.storage, group.get())) {
            outer->body->made.insert_or_assign(key, Ref<Group>::share(group.get()));
        }
    }
    for (Refill &refill : std::exchange(body.refills, {})) {
        count_group(refill.group.get(), &sums);
        if (!is_held) {
            settle_held(refill.group.get(), drops, &sums);
        }
        if (outer != nullptr) { // also one without a recipe: earlier writes there are no more
            outer->body->refills.push_back(std::move(refill));
        }
    }
    return sums;
}

// ---- for Python ---------------------------------------------------------------------------------

// Region(kept, around, others, chosen, inputs). `chosen`: numbers of operators whose results
// are kept; `inputs`: the region's input tensors.
bool region_make(Region *region, Packer *kept, PyObject *around, PyObject *others,
                 const Items &chosen, const Items &inputs) {
    region->kept = Ref<Packer>::share(kept).release();
    region->around = around == Py_None ? nullptr : Py_NewRef(around);
    region->others = others == Py_None ? nullptr : Py_NewRef(others);
    region->body = new Body;
    for (PyObject *number : chosen) {
        const Named *named = named_at(PyLong_AsSize_t(number));
        if (named == nullptr) {
            return false;
        }
        region->body->chosen.insert(named);
    }
    for (PyObject *tensor : inputs) {
        c10::TensorImpl *impl = nullptr;
        if (!impl_of(tensor, &impl)) {
            return false;
        }
        if (const c10::StorageImpl *storage = plain_storage(*impl, 0)) {
            region->body->inputs.insert(storage);
        }
    }
    return true;
}

void region_begin(Region *region, bool holds) {
    SWAPKIT_ASSERT(region->is_open == 0 && region->outer == nullptr);
    Region *outer = innermost;
    bool is_held = holds || (outer != nullptr && outer->holds != 0);
    region->holds = static_cast<char>(is_held);
    auto run = std::make_shared<Run>();
    run->outer = outer == nullptr ? nullptr : outer->body->run;
    run->depth = outer == nullptr ? 1 : run->outer->depth + 1;
    run->task = -1;
    region->body->run = std::move(run);
    Py_XINCREF(as_object(outer));
    region->outer = outer;
    region->is_open = 1;
    Py_INCREF(region);
    innermost = region;
}

// end(drops): close the region; drop or keep what it holds. Returns the bytes that it keeps without
// a user's choice, the bytes that it recomputes, and the number of groups that a rescue has moved.
PyObject *region_end(Region *region, bool drops) {
    auto own = Ref<Region>::share(region);
    Sums sums = {};
    if (region->is_open != 0) {
        SWAPKIT_ASSERT(innermost == region);
        Locked lock(region->kept->mover); // close the region even if this is interrupted
        region->is_open = 0;
        innermost = region->outer;
        sums = end(region, drops);
        Py_CLEAR(region->outer);
        region->body->inputs.clear();
        Py_DECREF(region);
        if (!lock) {
            return nullptr;
        }
    }
    return Py_BuildValue("nnn", sums.kept_bytes, sums.dropped_bytes, sums.moved);
}

PyObject *region_unpack(Region *, PyObject *packed) {
    auto kept = Ref<>::share(packed); // another thread may free the graph
    Packer *teller = teller_of(packed);
    return teller == nullptr ? unpack(packed) : packer_use(teller, packed);
}

void region_free(Region *region) {
    if (region->body != nullptr) {
        (void)count_kept(*region->body);
        delete region->body;
    }
}

using RegionLife = Life<Region, MadeBy<region_make>, Freed<region_free>, Visited<&Region::kept>,
                        Cleared<&Region::around, &Region::others>>;

Type region_type(RegionLife(), "Region", "One run of a captured region, and its hooks.",
                 method<"pack", region_pack>(), method<"unpack", region_unpack>(),
                 method<"begin", region_begin>(), method<"end", region_end>(),
                 field("is_inert", &Region::is_inert),
                 field("skips_backward", &Region::skips_backward),
                 field("is_open", &Region::is_open), field("holds", &Region::holds));

} // namespace

Region *open_region() { return innermost; }

bool region_keeps(const Region *region, const Named *named) {
    return region->body->chosen.contains(named);
}

void region_note_kept(Region *region, const std::vector<at::Tensor> &made) {
    for (const at::Tensor &tensor : made) {
        c10::StorageImpl *storage = plain_storage(*tensor.unsafeGetTensorImpl(), 0);
        if (storage != nullptr) {
            note(region, storage).is_chosen = true;
        }
    }
}

bool region_tells(const Region *region) { return region->others != nullptr; }

Packer *region_kept(const Region *region) { return region->kept; }

std::shared_ptr<Run> region_run(const Region *region) { return region->body->run; }

bool region_refills(Region *region, const Named *named, const Stack &stack) {
    if (!named->gives_written || (named->reads_written && !has_refills(region))) {
        return false;
    }
    WithPython python;
    return may_refill(named, stack, region);
}

void region_written(Region *region, const std::vector<c10::StorageImpl *> &changed) {
    if (changed.empty()) {
        return;
    }
    WithPython python;
    for (; region != nullptr; region = region->outer) {
        forget_refills(&region->body->refills, changed);
    }
}

std::vector<c10::StorageImpl *> region_writes(const Region *region, const Named *named,
                                              const Stack &stack) {
    if (!named->may_write() || !has_refills(region)) {
        return {};
    }
    return written_storages(named, named->given(stack));
}

Refill *region_refilled(Region *region, c10::TensorImpl *tensor, Span span) {
    std::uint32_t version = key_of(*tensor).version;
    for (; region != nullptr; region = region->outer) {
        Refill *found = find_refill(&region->body->refills, tensor, span, &version);
        if (found != nullptr) {
            found->group->depth = std::min(found->group->depth, region->body->run->depth);
            return found;
        }
    }
    return nullptr;
}

void region_carry(Region *region, const std::vector<at::Tensor> &made,
                  std::vector<Ref<Group>> groups) {
    Body &body = *region->body;
    if (!groups.empty() && groups.front()->recipe->named->gives_written) {
        add_refills(&body.refills, made, std::move(groups));
        return;
    }
    for (Ref<Group> &group : groups) {
        Key key = group->key;
        body.made.insert_or_assign(key, std::move(group));
    }
    if (body.made.size() >= body.next_sweep) {
        sweep(body);
    }
}

Group *region_find(Region *region, Key key) {
    for (; region != nullptr; region = region->outer) {
        auto found = region->body->made.find(key);
        Group *group = found == region->body->made.end() ? nullptr : found->second.get();
        if (group != nullptr && group->recipe != nullptr && is_of(key.storage, group)) {
            group->depth = std::min(group->depth, region->body->run->depth);
            return group;
        }
    }
    return nullptr;
}

Ref<> region_operand(Region *region, c10::TensorImpl *impl, Key key, Span span) {
    Mover *mover = region->kept->mover;
    if (region->others != nullptr) { // each operand is an event, even if it has a group
        bool is_kept = is_weight(impl);
        Ref<> tensor = is_kept ? Ref<>() : Ref<>::steal(wrap(impl));
        if (!is_kept && !tensor) {
            return {};
        }
        // Tensor subclasses have their own `detach`, which cannot run here.
        return is_kept || as_object(Py_TYPE(tensor.get())) != links.tensor
                   ? Ref<>::steal(as_object(handle_new(impl, nullptr)))
                   : Ref<>::steal(pack_other(region, tensor.get(), impl,
                                             region->body->inputs.contains(key.storage)));
    }
    if (Ref<Group> group = find_group(mover, impl, key, span)) {
        group_cover(group.get(), span);
        return Ref<>::steal(as_object(handle_new(impl, group.get())));
    }
    bool is_input = region->body->inputs.contains(key.storage);
    bool is_moved = is_input ? region->around != nullptr : !is_kept_here(region);
    if (!is_moved) {
        if (!is_input) {
            note(region, key.storage).holds++;
        }
        return Ref<>::steal(as_object(handle_new(impl, nullptr)));
    }
    Ref<> tensor = Ref<>::steal(wrap(impl));
    return tensor ? Ref<>::steal(pack_other(region, tensor.get(), impl, is_input)) : Ref<>();
}

} // namespace swapkit
