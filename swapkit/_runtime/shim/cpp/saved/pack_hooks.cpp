// pack_hooks.cpp - the saved-tensor hooks: pack where autograd saves a tensor, unpack where it is
// used.
#include "saved/pack_hooks.hpp"
#include "memory/streams.hpp"
#include "moves/plan_cursor.hpp"
#include "moves/write_behind.hpp"
#include "recompute/capturing.hpp"
#include "recompute/standby.hpp"
#include "running/operator_clock.hpp"
#include "saved/storage_choices.hpp"
#include "saved/weights.hpp"
#include "saved/wrappers.hpp"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <utility>

namespace swapkit {

Ref<Mover> mover_for(Mover *mover, c10::Device device) {
    if (device == mover->device()) {
        return Ref<Mover>::share(mover);
    }
    Ref<> other = call_method<"other_mover">(mover->policy, device.type(), device.index());
    bool is_one = other && Py_TYPE(other.get()) == &mover_type;
    return is_one ? Ref<Mover>::steal(reinterpret_cast<Mover *>(other.release())) : Ref<Mover>();
}

bool Packer::is_following() const {
    return follows != 0 && is_inert == 0 && swapkit::is_following(mover);
}

namespace {

// Whether this thread's last pack saved the first tensor of a new group.
thread_local bool saved_new = false;

} // namespace

int is_state(const Mover *mover, const c10::StorageImpl *storage) {
    auto address = reinterpret_cast<std::uintptr_t>(storage);
    return is_true(call_method<"is_state">(mover->tracker, address));
}

int may_move(Mover *mover, c10::TensorImpl *impl, const Terms &terms) {
    if (gathers_gradients(impl)) {
        return 0;
    }
    // A view of a leaf may be a weight. A tensor with 2-byte items may be autocast's cast of one.
    bool may_be_cast = terms.action == Action::swap && impl->itemsize() == sizeof(c10::Half);
    if (!views_leaf(impl) && !may_be_cast) {
        return 1;
    }
    if (views_parameter(impl)) {
        return 0;
    }
    if (!may_be_cast && !views_unknown(impl)) {
        return 1;
    }
    Ref<> tensor = Ref<>::steal(wrap(impl));
    int is_weight = is_true(call_method<"is_weight">(mover->policy, tensor.get()));
    return is_weight < 0 ? -1 : 1 - is_weight;
}

bool packs_any(const Packer *packer) {
    bool is_kept = packer->terms.action == Action::keep || packer->terms.action == Action::pass;
    return !is_kept || !marks_are_empty() || is_any_recomputed();
}

bool is_counted(const Mover *mover, const c10::StorageImpl &storage) {
    if (!is_of_allocator(mover->device(), storage)) {
        return false;
    }
    auto *pool = reinterpret_cast<sk_pool *>(mover->pool);
    return pool == nullptr ? has_streams(mover->device()) && storage.data() != nullptr
                           : links.sk_pool_owns(pool, storage.data()) != 0;
}

namespace {

// Return whether a device graph is being captured: its replays would not repeat copies of tensors
// that are saved now. -1: an exception is set.
int is_recording(const Mover *mover) {
    return has_streams(mover->device()) ? is_true(call(links.is_capturing, mover->device_type)) : 0;
}

// Return whether a storage that is saved for the first time at this version may move. -1: an
// exception is set.
int admit(Mover *mover, c10::TensorImpl *impl, Key key, const Terms &terms) {
    int may = may_move(mover, impl, terms);
    if (may == 1) {
        may = 1 - is_recording(mover);
    }
    if (may != 1) {
        return may == 0 ? 0 : -1;
    }
    if (terms.action == Action::automatic) {
        return is_counted(mover, *key.storage) ? 1 : 0;
    }
    int state = is_state(mover, key.storage);
    return state < 0 ? -1 : 1 - state;
}

// The module in whose call this thread bypasses the hooks (`model/tracker.py`), and the number of
// saves there.
thread_local std::uint32_t coarse_tag = 0, coarse_saves = 0;

// Set the site where a group is saved; false: an exception is set.
bool find_site(Mover *mover, Group *group) {
    if (follower_finds_site(mover->follower, group)) {
        (void)links.sk_tag_set(group->tag); // as the module hooks do
        return true;
    }
    if (coarse_tag != 0) {
        group->tag = coarse_tag;
        group->index = coarse_saves++;
        return true;
    }
    Ref<> site = call_method<"site">(mover->tracker);
    return site && PyArg_ParseTuple(site.get(), "II", &group->tag, &group->index) != 0;
}

// Return the group of such a storage, `captured` or new. Null without an exception: the tensor
// stays where it is.
Ref<Group> add_group(Mover *mover, c10::TensorImpl *impl, Key key, const Terms &terms,
                     Ref<Group> captured) {
    if (admit(mover, impl, key, terms) != 1) {
        if (captured) {
            forget_computed(mover, captured.get());
        }
        return Ref<Group>();
    }
    Ref<Group> group =
        captured ? std::move(captured) : Ref<Group>::steal(group_new(mover, terms, key));
    if (!group || !find_site(mover, group.get())) {
        return Ref<Group>();
    }
    if (group->standby == Standby::captured) {
        group->standby = group->recipe != nullptr ? Standby::spare : Standby::none;
    } else {
        enroll(mover, group.get());
    }
    return group;
}

} // namespace

Joined join_group(Mover *mover, c10::TensorImpl *impl, Key key, Span span, const Terms &terms) {
    Ref<Group> group = find_group(mover, impl, key, span);
    if (!group || group->standby == Standby::captured) {
        return {add_group(mover, impl, key, terms, std::move(group)), true};
    }
    if (terms.action != Action::automatic && group->terms.action == Action::automatic) {
        // The group was saved before, outside of this scope: the scope's terms replace its terms.
        Py_INCREF(terms.placement);
        Py_DECREF(std::exchange(group->terms, terms).placement);
    }
    return {std::move(group), false};
}

namespace {

// Apply a group's terms, from a mark or the scope, after a save.
bool follow_terms(const Packer *packer, Mover *mover, const Joined &joined, bool is_marked) {
    Group *group = joined.group.get();
    saved_new = joined.is_new;
    if (group->terms.action == Action::keep) {
        return true; // the chosen swap is void
    }
    if (is_marked || packer->terms.spares) { // a recomputed operator may make it void
        return send_marked(mover, group, packer->terms, joined.is_new);
    }
    if (packer->terms.action != Action::automatic) {
        return send(mover, group);
    }
    if (mover == packer->mover && packer->is_following()) {
        return agenda_attend(mover, false); // the plan decides about the group
    }
    return behind_saved(mover, group, joined.is_new) && agenda_attend(mover, false);
}

PyObject *keep(PyObject *tensor) { return as_object(handle_saved(tensor)); }

// Return the handle of a tensor that a mover manages. `terms`: the mark's if it `is_marked`, else
// the scope's.
PyObject *pack_served(Packer *packer, Mover *mover, PyObject *tensor, c10::TensorImpl *impl,
                      const Terms &terms, bool is_marked) {
    Locked lock(mover);
    if (!lock) {
        return nullptr;
    }
    // Look again: while this thread waited for the lock, the tensor may have got another storage.
    Span span = {};
    auto storage =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(look(*impl, terms.min_bytes, &span));
    if (!storage) {
        return keep(tensor);
    }
    Key key = {.storage = storage.get(), .version = impl->version_counter().current_version()};
    Joined joined = join_group(mover, impl, key, span, terms);
    Group *group = joined.group.get();
    if (group == nullptr) {
        return PyErr_Occurred() != nullptr ? nullptr : keep(tensor);
    }
    group_cover(group, span);
    std::int64_t here = current_stream(mover->device());
    if (!joined.is_new && here != group->stream) {
        note_use(key.storage, mover->device(), group->stream); // that stream may still read it
    }
    group->stream = here;
    Ref<> handle = new_handle(impl, group);
    bool is_done = handle && follow_terms(packer, mover, joined, is_marked);
    return is_done ? handle.release() : nullptr;
}

// Return the handle of a tensor whose bytes are recomputed. None without an exception: they are
// not.
Ref<> pack_recomputed(Mover *around, c10::TensorImpl *impl) {
    Ref<Mover> mover = mover_for(around, impl->device());
    if (!mover || mover->books->recomputed == 0) {
        return {};
    }
    Locked lock(mover.get());
    Ref<Group> group = lock ? find_recomputed(mover.get(), key_of(*impl)) : Ref<Group>();
    return group && group->standby == Standby::none && recipe_may_serve(group.get())
               ? new_handle(impl, group.get())
               : Ref<>();
}

// Return the handle of a tensor, while operators are hidden from modes.
PyObject *pack_plain(Packer *packer, PyObject *tensor) {
    OwnOperators ours;
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return nullptr;
    }
    if (is_trapped(*impl) || plain_storage(*impl, packer->terms.min_bytes) == nullptr) {
        return keep(tensor);
    }
    Ref<> recomputed = pack_recomputed(packer->mover, impl);
    if (recomputed || PyErr_Occurred() != nullptr) {
        return recomputed.release();
    }
    Mark mark = marks_are_empty() ? Mark{} : find_mark(key_of(*impl));
    bool is_marked = mark.placement && packer->terms.action != Action::keep;
    const Terms &terms = is_marked ? mark.terms : packer->terms;
    if (terms.action == Action::keep || terms.action == Action::pass) {
        return keep(tensor);
    }
    Ref<Mover> serving = mover_for(packer->mover, impl->device());
    Mover *mover = serving.get();
    if (mover == nullptr) {
        return PyErr_Occurred() != nullptr ? nullptr : keep(tensor);
    }
    return pack_served(packer, mover, tensor, impl, terms, is_marked);
}

PyObject *pack_now(Packer *packer, PyObject *tensor) {
    if (!send_passed()) {
        return nullptr;
    }
    if (packer->is_inert != 0 || !packs_any(packer) || as_object(Py_TYPE(tensor)) != links.tensor) {
        return keep(tensor);
    }
    return is_observed() ? call_unseen<"pack_plain">(as_object(packer), tensor).release()
                         : pack_plain(packer, tensor);
}

// Notify the observer, if there is one, of the result of an event; false: it raised.
template <Text name> bool tell(const Packer *packer, PyObject *first, PyObject *second) {
    if (packer->observer == nullptr || packer->observer == Py_None || packer->is_inert != 0) {
        return true;
    }
    auto observer = Ref<>::share(packer->observer); // the call may replace it
    return static_cast<bool>(call_unseen<name>(observer.get(), first, second));
}

// Follow the plan, if there is one, for a tensor that was just saved.
bool follow(const Packer *packer, PyObject *packed) {
    if (!packer->is_following()) {
        return true;
    }
    OwnOperators ours;
    int is_expected = follow_save(packer->mover, packed, saved_new);
    if (is_expected != 0 || Py_TYPE(packed) != &handle_type) {
        return is_expected >= 0;
    }
    // The plan would have decided about this group.
    auto group = Ref<Group>::share(reinterpret_cast<Handle *>(packed)->group);
    if (!group || group->mover != packer->mover || group->terms.action != Action::automatic) {
        return true;
    }
    Locked lock(packer->mover);
    return lock && behind_saved(packer->mover, group.get(), saved_new) &&
           agenda_attend(packer->mover, false);
}

} // namespace

PyObject *packer_pack(Packer *packer, PyObject *tensor) {
    if (!raise_interruption()) {
        return nullptr;
    }
    auto own = Ref<Packer>::share(packer); // as in `packer_use`
    if (!pack_awaited(packer)) {
        return nullptr;
    }
    if (may_wrap(tensor)) {
        Ref<> whole = pack_wrapper(packer, tensor);
        if (whole.get() != Py_None) {
            return whole.release();
        }
    }
    saved_new = false;
    if (packer->follows != 0 && is_in_backward()) {
        packer->has_saved_late = 1;
    }
    Ref<> packed = Ref<>::steal(pack_now(packer, tensor));
    if (packed && !follow(packer, packed.get())) {
        return nullptr;
    }
    if (packer->is_following()) {
        follower_capture(packer->mover->follower);
    }
    return packed && tell<"saved">(packer, tensor, packed.get()) ? packed.release() : nullptr;
}

namespace {

// Tag this thread's allocations from now on with the module that saved a group.
bool label(Mover *mover, const Group *group) {
    constexpr std::uint32_t backward = std::uint32_t{1} << 31;
    int labels = is_true<"is_on">(mover->tracker);
    if (labels == 1) {
        std::uint32_t former = links.sk_tag_set(group->tag | backward);
        if ((former & backward) == 0) { // the first in this backward pass
            return static_cast<bool>(call_method<"backward_begins">(mover->policy, former));
        }
    }
    return labels >= 0;
}

// Let this thread's stream use memory that was copied back, perhaps on another stream.
void use_here(const Mover *mover, const Group *group) {
    std::int64_t here = current_stream(mover->device());
    if (here != group->stream) {
        order_streams(mover->device(), group->stream, here);
        note_use(group->storage, mover->device(), here);
    }
}

void packer_end(Packer *packer) { stand_by(packer, false); }

bool packer_stand_by(Packer *packer, bool is_on) {
    Locked lock(packer->mover);
    if (lock) {
        stand_by(packer, is_on);
    }
    return static_cast<bool>(lock);
}

using PackerLife = Life<Packer, Unlinked<packer_end>, Cleared<&Packer::observer, &Packer::awaited>,
                        Visited<&Packer::mover>,
                        Freed<[](Packer *packer) { Py_XDECREF(packer->terms.placement); }>>;

} // namespace

void set_coarse_site(std::uint32_t tag) {
    coarse_tag = tag;
    coarse_saves = 0;
}

bool handle_bytes(Handle *handle) {
    Group *group = handle->group;
    if (group == nullptr) {
        return true;
    }
    Mover *mover = group->mover;
    agenda_needed(mover, group);
    if (handle->is_stripped) {
        if (!bring_back(mover, group)) {
            return false;
        }
        handle_fill(handle);
    }
    if (group->is_moved != 0) {
        use_here(mover, group);
    }
    return true;
}

PyObject *packer_use(Packer *packer, PyObject *packed) {
    Mover *mover = packer->mover;
    if (!backward_begins(mover)) {
        return nullptr;
    }
    auto own = Ref<Packer>::share(packer);
    auto kept = Ref<>::share(packed); // another thread may drop the graph
    if (!pack_awaited(packer)) {
        return nullptr;
    }
    if (Py_TYPE(packed) != &handle_type) { // a wrapper: what is inside comes here
        return unpack(packed);
    }
    bool is_followed = packer->is_following();
    unsigned long long waits = mover->waits;
    if (is_followed && !follow_use(mover, packed)) {
        return nullptr;
    }
    Ref<> tensor = Ref<>::steal(unpack(packed));
    if (tensor && is_followed && !follow_used(mover, mover->waits != waits)) {
        return nullptr;
    }
    if (is_followed && packer->is_following()) {
        follower_capture(mover->follower);
    }
    return tensor && tell<"used">(packer, packed, tensor.get()) ? tensor.release() : nullptr;
}

Packer *packer_of(PyObject *pack) {
    PyObject *self = PyCFunction_Check(pack) ? PyCFunction_GET_SELF(pack) : nullptr;
    return self != nullptr && Py_TYPE(self) == &packer_type ? reinterpret_cast<Packer *>(self)
                                                            : nullptr;
}

Packer *innermost_packer() {
    const auto &state = at::SavedTensorDefaultHooks::get_tls_state();
    if (state.stack.empty() || state.disabled_error_message) {
        return nullptr;
    }
    const c10::SafePyObject &top = state.stack.top().first;
    return packer_of(top.ptr(&top.pyinterpreter()));
}

Ref<Packer> packer_new(Mover *mover, PyObject *placement) {
    Terms terms = {};
    Ref<> awaited = Ref<>::steal(terms_read(placement, &terms) ? PyList_New(0) : nullptr);
    auto owned = Ref<>::steal(terms.placement);
    Ref<Packer> packer = awaited ? allocate<Packer>() : Ref<Packer>();
    if (packer) { // made when Python has run: nobody finds it before it is whole
        packer->mover = Ref<Mover>::share(mover).release();
        packer->terms = terms;
        packer->awaited = awaited.release();
        (void)owned.release();
    }
    return packer;
}

PyObject *unpack(PyObject *argument) {
    if (Py_TYPE(argument) != &handle_type) {
        if (PyObject_HasAttr(argument, interned<"unpack">()) == 0) {
            return PyErr_Format(PyExc_TypeError, "expected a SavedTensor, not %R", argument);
        }
        return call_method<"unpack">(argument).release(); // a recorder's
    }
    // Autograd may drop the handle on another thread while this one waits.
    auto handle = Ref<Handle>::share(reinterpret_cast<Handle *>(argument));
    Group *group = handle->group;
    OwnOperators ours;
    if (!raise_interruption()) {
        return nullptr;
    }
    if (group == nullptr) {
        return handle_check(handle.get()) ? tensor_of(handle.get()) : nullptr;
    }
    Mover *mover = group->mover;
    Locked lock(mover);
    bool is_sound = lock && handle_check(handle.get()) && label(mover, group);
    return is_sound ? tensor_of(handle.get()) : nullptr;
}

Type packer_type(PackerLife(), "Packer", "The saved-tensor hooks of a scope.",
                 method<"pack", packer_pack>(), method<"pack_plain", pack_plain>(),
                 method<"pack_inside", packer_pack_inside>(), method<"unpack", packer_use>(),
                 method<"stand_by", packer_stand_by>(), variable("observer", &Packer::observer),
                 field("awaited", &Packer::awaited), variable("follows", &Packer::follows),
                 variable("is_inert", &Packer::is_inert),
                 variable("has_saved_late", &Packer::has_saved_late),
                 variable("skips_backward", &Packer::skips_backward));

} // namespace swapkit
