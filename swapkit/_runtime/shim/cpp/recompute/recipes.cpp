// recipes.cpp - recomputing a group's bytes.
#include "recompute/recipes.hpp"

#include "memory/streams.hpp"
#include "recompute/regions.hpp"
#include "recompute/repeat.hpp"
#include "running/operator_clock.hpp"
#include "saved/pack_hooks.hpp"
#include "saved/storage_choices.hpp"
#include "saved/weights.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace swapkit {

namespace {

// The storage that an operand had when its operator ran; null: unknown, or freed.
const c10::StorageImpl *storage_of(const Operand &operand) {
    const Handle *handle = handle_in(operand);
    if (handle == nullptr) {
        return nullptr;
    }
    if (handle->weight != nullptr) {
        return handle->weight->first;
    }
    if (handle->is_stripped) {
        return handle->group->weak;
    }
    return handle->alias->has_storage() ? handle->alias->unsafe_storage().unsafeGetStorageImpl()
                                        : nullptr;
}

std::size_t recomputed_count = 0; // groups with a recipe, of all movers. Guarded by the GIL

// ---- lifetimes ----------------------------------------------------------------------------------

// The state of the generators before an operator that may draw random numbers.
Ref<> random_state(const Recipe *recipe) {
    std::string device = recipe->mover->device().str();
    return Ref<>::steal(
        PyObject_CallFunction(links.random_state, "Os", recipe->named->function, device.c_str()));
}

// Drop the operands of a recipe: it cannot run any more.
void drop_operands(Recipe *recipe) {
    recipe->is_over = true;
    remove_reader(recipe);
    std::vector<Operand> operands = std::exchange(recipe->operands, {});
    recipe->arguments.clear();
}

// Ending a recipe can end others, in chains of any length: use a list instead of recursion.
void end_recipe(Recipe *recipe) {
    static thread_local std::vector<Recipe *> *ending = nullptr;
    if (ending != nullptr) {
        ending->push_back(recipe);
        return;
    }
    std::vector<Recipe *> ended = {recipe};
    ending = &ended;
    while (!ended.empty()) {
        Recipe *next = ended.back();
        ended.pop_back();
        drop_operands(next);
        delete next;
    }
    ending = nullptr;
}

// Detach a group from its recipe.
void leave(Group *group) {
    Recipe *recipe = std::exchange(group->recipe, nullptr);
    if (group->standby != Standby::captured) {
        group->standby = Standby::none;
    }
    recipe->mover->books->recomputed--;
    recomputed_count--;
    RecipeRef::drop(recipe);
}

// ---- taking operands out of arguments -----------------------------------------------------------

bool has(const std::vector<std::size_t> &arguments, std::size_t argument) {
    return std::find(arguments.begin(), arguments.end(), argument) != arguments.end();
}

// Take one tensor out of the arguments, for an operand whose place and use are known. False: it
// cannot be kept, or an exception is set.
bool take_operand(Recipe *recipe, const Keeping &keeping, const at::Tensor &tensor,
                  Operand operand) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    operand.packed = operand.is_scratch ? scratch_of(impl) : keep_operand(keeping, impl);
    if (!operand.packed) {
        return false;
    }
    if (recipe->run && !operand.is_scratch) {
        operand.sample = sample_operand(operand.packed.get(), impl, recipe->named->gives_written);
    }
    recipe->operands.push_back(std::move(operand));
    const c10::StorageImpl *storage = storage_of(recipe->operands.back());
    if (storage != nullptr) {
        add_reader(recipe, storage);
    }
    return true;
}

// Take the tensors out of a list argument, and keep a list without them.
bool take_list(Recipe *recipe, const Keeping &keeping, const c10::IValue &value,
               std::uint32_t argument) {
    c10::List<c10::IValue> given = value.toList();
    c10::impl::GenericList rest(given.elementType());
    for (std::size_t place = 0; place < given.size(); place++) {
        const c10::IValue &each = given.get(place);
        bool is_operand = each.isTensor() && each.toTensor().defined();
        rest.push_back(is_operand ? c10::IValue() : each);
        if (is_operand &&
            !take_operand(recipe, keeping, each.toTensor(),
                          {.argument = argument, .place = static_cast<std::int32_t>(place)})) {
            return false;
        }
    }
    recipe->arguments.emplace_back(std::move(rest));
    return true;
}

// How an operator uses a tensor argument.
Operand operand_at(const Named &named, std::size_t at, bool is_training) {
    bool is_given = named.gives_written && has(named.declared, at);
    bool is_scratch = is_given ? !named.reads_written : is_training && has(named.undeclared, at);
    return {.argument = static_cast<std::uint32_t>(at),
            .is_scratch = is_scratch,
            .is_written = is_given && !is_scratch};
}

bool take_arguments(Recipe *recipe, const Keeping &keeping, const Stack &stack) {
    const Named &named = *recipe->named;
    std::size_t count = named.arguments;
    const c10::IValue *values = named.given(stack);
    bool is_training = named.is_training(values);
    recipe->arguments.reserve(count);
    for (std::size_t at = 0; at < count; at++) {
        const c10::IValue &value = values[at];
        if (value.isTensor() && value.toTensor().defined()) {
            if (!take_operand(recipe, keeping, value.toTensor(),
                              operand_at(named, at, is_training))) {
                return false;
            }
            recipe->arguments.emplace_back();
        } else if (value.isList()) {
            if (!take_list(recipe, keeping, value, static_cast<std::uint32_t>(at))) {
                return false;
            }
        } else {
            recipe->arguments.push_back(value);
        }
    }
    return true;
}

// Whether a scratch operand shares its storage with another argument.
bool shares_scratch(const Recipe *recipe, const Stack &stack) {
    std::size_t count = recipe->named->arguments;
    const c10::IValue *values = recipe->named->given(stack);
    auto storage_in = [values](std::size_t at) {
        bool is_tensor = values[at].isTensor() && values[at].toTensor().has_storage();
        return is_tensor ? values[at].toTensor().storage().unsafeGetStorageImpl() : nullptr;
    };
    for (const Operand &operand : recipe->operands) {
        const c10::StorageImpl *written =
            operand.is_scratch ? storage_in(operand.argument) : nullptr;
        for (std::size_t at = 0; written != nullptr && at < count; at++) {
            if (at != operand.argument && storage_in(at) == written) {
                return true;
            }
        }
    }
    return false;
}

// ---- settling -----------------------------------------------------------------------------------

// Whether a storage is one of these. Checked because the index may hold addresses that were reused.
bool is_among(const c10::StorageImpl *storage, const std::vector<c10::StorageImpl *> &some) {
    return storage != nullptr && std::find(some.begin(), some.end(), storage) != some.end();
}

// Whether a recipe needs the present bytes of these storages. A storage that a weight has left may
// change: from then on, the recipe reads the weight where it is.
bool reads_any(const Recipe *recipe, const std::vector<c10::StorageImpl *> &changed) {
    return std::any_of(recipe->operands.begin(), recipe->operands.end(),
                       [&](const Operand &operand) {
                           const Handle *handle = handle_in(operand);
                           const Weight *weight = handle == nullptr ? nullptr : handle->weight;
                           return (weight == nullptr || !weight->has_left()) &&
                                  is_among(storage_of(operand), changed);
                       });
}

// Detach written results from their recipe. As in plain autograd, the saved tensors then change.
void release_results(Recipe *recipe, const std::vector<c10::StorageImpl *> &changed) {
    for (Group *result : std::vector<Group *>(recipe->results)) {
        auto group = Ref<Group>::share(result);
        if (!group || !is_among(group->weak, changed)) {
            continue;
        }
        bool is_revived =
            is_missing(group.get()) && group->nhandles > 0 && group_revive(group.get());
        recipe_leave(group.get());
        if (is_revived) { // others can find the group from now on
            enroll_again(recipe->mover.get(), group.get());
        }
    }
}

void enroll_all(Mover *mover, const std::vector<Ref<Group>> &groups) {
    for (const Ref<Group> &each : groups) {
        enroll_again(mover, each.get());
    }
}

bool settle_one(Recipe *recipe, bool is_over) {
    RecipeRef hold(recipe);
    std::vector<Ref<Group>> revived; // others can find them once they need no recipe
    for (std::size_t at = 0; at < recipe->results.size(); at++) {
        Group *group = recipe->results[at];
        if (group == nullptr || group->nhandles == 0 || !is_missing(group)) {
            continue;
        }
        if (group_revive(group)) { // not written to yet, or kept as it is now
            revived.push_back(Ref<Group>::share(group));
            continue;
        }
        bool is_needed = !recipe->is_spare || recipe->mover->books->has_dropped;
        if (is_over || !is_needed) { // it cannot, or need not, run any more
            drop_operands(recipe);
            enroll_all(recipe->mover.get(), revived);
            return true;
        }
        if (!compute_again(recipe->mover.get(), group)) {
            enroll_all(recipe->mover.get(), revived);
            return false;
        }
    }
    consume(recipe);
    enroll_all(recipe->mover.get(), revived);
    return true;
}

// Whether the operator has only written to the tensor that it was given.
bool is_as_given(const Recipe *recipe, const at::Tensor &tensor, std::size_t result) {
    std::size_t argument = recipe->named->declared[result];
    return std::any_of(recipe->operands.begin(), recipe->operands.end(), [&](const Operand &each) {
        const auto *handle = reinterpret_cast<const Handle *>(each.packed.get());
        return each.argument == argument && handle->alias->sizes() == tensor.sizes() &&
               handle->alias->strides() == tensor.strides() &&
               handle->alias->dtype() == tensor.dtype();
    });
}

// The storages of an operator's results. Empty: a run whose results cannot be recomputed.
std::vector<Key> result_keys(const Recipe *recipe, const std::vector<at::Tensor> &made) {
    std::vector<Key> keys;
    for (const at::Tensor &tensor : made) {
        Key key = key_of(*tensor.unsafeGetTensorImpl());
        // Some operators return a view of an operand that their schema does not declare.
        bool is_view = std::find(recipe->reads.begin(), recipe->reads.end(), key.storage) !=
                       recipe->reads.end();
        bool is_plain = key.storage == nullptr ? tensor.numel() == 0 : tensor.storage_offset() == 0;
        if (recipe->named->gives_written) {
            is_plain = key.storage != nullptr && is_as_given(recipe, tensor, keys.size());
        }
        // Settings and random numbers are recorded for the mover's device.
        bool is_bound = recipe->run || recipe->is_chosen;
        bool is_here = !is_bound || tensor.device() == recipe->mover->device();
        if (is_view || !is_plain || !is_here) {
            return {};
        }
        keys.push_back(key);
    }
    return keys;
}

// Note, after the run, whether the operator has drawn random numbers. False: an exception is set.
bool note_random(Recipe *recipe) {
    if (!recipe->random) {
        return true;
    }
    Ref<> moved = call(links.has_moved, recipe->random.get());
    if (moved && moved.get() == Py_False) {
        recipe->random = Ref<>();
    }
    return static_cast<bool>(moved);
}

} // namespace

// ---- the interface ------------------------------------------------------------------------------

const Handle *handle_in(const Operand &operand) {
    return operand.is_scratch ? nullptr : as_handle(operand.packed.get());
}

void consume(Recipe *recipe) {
    RecipeRef hold(recipe);
    for (Group *group : std::exchange(recipe->results, {})) {
        if (group != nullptr) {
            leave(group);
        }
    }
    drop_operands(recipe);
}

Layout layout_of(const at::Tensor &tensor) {
    return {.sizes = tensor.sizes().vec(),
            .strides = tensor.strides().vec(),
            .offset = tensor.storage_offset(),
            .dtype = tensor.scalar_type()};
}

void RecipeRef::drop(Recipe *recipe) {
    SWAPKIT_ASSERT(has_python() && recipe->owners > 0);
    if (--recipe->owners == 0) {
        end_recipe(recipe);
    }
}

void Named::run(c10::DispatchKeySet keys, Stack *stack) const {
    if (former) {
        former->callBoxed(op, keys, stack);
    } else {
        op.redispatchBoxed(keys, stack);
    }
}

bool Named::is_random(const c10::IValue *arguments) const {
    bool is_never =
        chance >= 0 && arguments[chance].isDouble() && arguments[chance].toDouble() == 0;
    return may_be_random && !is_never;
}

bool Named::is_training(const c10::IValue *arguments) const {
    return flag < 0 || !arguments[flag].isBool() || arguments[flag].toBool();
}

// The dispatch keys of this thread. `alone`: without those of Python modes.
static c10::impl::LocalDispatchKeySet local_keys(bool alone) {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    if (alone) {
        keys.included_ = keys.included_ - c10::DispatchKeySet({c10::DispatchKey::Python,
                                                               c10::DispatchKey::PythonTLSSnapshot,
                                                               c10::DispatchKey::Fake});
    }
    return keys;
}

RecipeRef recipe_begin(const Named *named, c10::DispatchKeySet keys, const Stack &stack,
                       const Keeping &keeping) {
    Region *region = keeping.region;
    bool is_chosen = keeping.captor == Captor::user;
    const c10::IValue *values = named->given(stack);
    if (std::any_of(named->barred.begin(), named->barred.end(),
                    [values](std::size_t at) { return !values[at].isNone(); })) {
        return {};
    }
    std::uint64_t word = settings_word(keeping.mover->device());
    RecipeRef recipe(new Recipe{.named = named,
                                .mover = Ref<Mover>::share(keeping.mover),
                                .run = region == nullptr ? nullptr : region_run(region),
                                .keys = keys,
                                .local = local_keys(region != nullptr || is_chosen),
                                .wants_gradients = c10::GradMode::is_enabled(),
                                .is_spare = keeping.captor == Captor::standby,
                                .is_chosen = is_chosen,
                                .settings_word = word,
                                .settings = settings_now(word)});
    bool is_taken = recipe->settings && take_arguments(recipe.get(), keeping, stack) &&
                    !shares_scratch(recipe.get(), stack);
    if (is_taken && named->is_random(values)) {
        recipe->random = random_state(recipe.get());
        is_taken = static_cast<bool>(recipe->random);
    }
    return is_taken ? std::move(recipe) : RecipeRef();
}

std::vector<at::Tensor> last_tensors(const Stack &stack, std::size_t count) {
    std::vector<at::Tensor> found;
    for (std::size_t at = stack.size() - count; at < stack.size(); at++) {
        if (stack[at].isTensor() && stack[at].toTensor().defined()) {
            found.push_back(stack[at].toTensor());
        } else if (stack[at].isTensorList()) {
            std::vector<at::Tensor> listed = stack[at].toTensorVector();
            found.insert(found.end(), listed.begin(), listed.end());
        }
    }
    return found;
}

std::vector<at::Tensor> tensors_given(const Named *named, const Stack &stack) {
    return last_tensors(stack, named->arguments);
}

std::vector<at::Tensor> tensors_made(const Named *named, const Stack &stack) {
    return last_tensors(stack, named->op.schema().returns().size());
}

static void join(Recipe *recipe, Group *group, std::size_t result) {
    group->recipe = recipe;
    recipe->owners++;
    group->result = static_cast<std::uint32_t>(result);
    group->standby = recipe->is_spare ? Standby::captured : Standby::none;
    if (recipe->run) {
        group->standby = Standby::region;
        group->depth = recipe->run->depth;
    }
}

bool recipe_end(Recipe *recipe, const std::vector<at::Tensor> &made,
                const std::vector<bool> &wanted, const Terms &terms,
                std::vector<Ref<Group>> *groups_out) {
    if (recipe->is_over) { // a kernel inside the operator has changed an operand
        return true;
    }
    std::vector<Key> keys = result_keys(recipe, made);
    if (!note_random(recipe)) {
        return false;
    }
    if (std::none_of(keys.begin(), keys.end(), [](Key key) { return key.storage != nullptr; })) {
        return true;
    }
    recipe->results.resize(made.size());
    recipe->layouts.resize(made.size());
    for (std::size_t at = 0; at < made.size(); at++) {
        if (!wanted[at] || keys[at].storage == nullptr) {
            continue;
        }
        if (recipe->is_spare && keys[at].storage->nbytes() < terms.min_bytes) {
            continue; // too small to drop, and recipes that read it keep it
        }
        auto group = Ref<Group>::steal(group_new_recomputed(recipe->mover.get(), terms, keys[at]));
        if (!group) {
            return false;
        }
        join(recipe, group.get(), at);
        recipe->results[at] = group.get();
        recipe->layouts[at] = layout_of(made[at]);
        group->stream = current_stream(recipe->mover->device());
        if (recipe->named->gives_written) {
            group_part(group.get(), static_cast<std::size_t>(made[at].nbytes()));
            recipe->layouts[at].offset = 0;
        } else {
            add_reader(recipe, keys[at].storage); // so that writes to the result settle the recipe
        }
        enroll_recomputed(recipe->mover.get(), group.get());
        recomputed_count++;
        groups_out->push_back(std::move(group));
    }
    return true;
}

std::size_t made_bytes(const Group *group) {
    const Recipe *recipe = group->recipe;
    if (recipe == nullptr || group->result >= recipe->layouts.size()) {
        return 0;
    }
    const Layout &layout = recipe->layouts[group->result];
    std::int64_t count = 1, extent = 1;
    for (std::size_t at = 0; at < layout.sizes.size(); at++) {
        count *= layout.sizes[at];
        extent += (layout.sizes[at] - 1) * layout.strides[at];
    }
    bool has_gaps = count != extent || layout.offset != 0;
    return has_gaps ? 0 : static_cast<std::size_t>(count) * c10::elementSize(layout.dtype);
}

void recipe_leave(Group *group) {
    Recipe *recipe = group->recipe;
    if (recipe != nullptr) {
        if (group->result < recipe->results.size()) {
            recipe->results[group->result] = nullptr;
        }
        leave(group);
    }
}

bool is_any_recomputed() { return recomputed_count != 0; }

bool recipe_may_serve(const Group *group) {
    const Recipe *recipe = group->recipe;
    if (recipe == nullptr || !recipe->is_chosen) {
        return true;
    }
    return !recipe->is_over && std::all_of(recipe->operands.begin(), recipe->operands.end(),
                                           [](const Operand &operand) {
                                               const Handle *handle = handle_in(operand);
                                               return handle == nullptr || handle_is_intact(handle);
                                           });
}

bool settle(const std::vector<c10::StorageImpl *> &changed, bool is_over, Settled which) {
    weights_written(changed);
    std::vector<RecipeRef> found = find_readers(changed);
    if (which == Settled::chosen) {
        std::erase_if(found, [](const RecipeRef &each) { return !each->is_chosen; });
    }
    // Readers first: a result that is written may be another recipe's operand.
    for (const RecipeRef &each : found) {
        Locked lock(each->mover.get());
        if (!lock || (reads_any(each.get(), changed) && !settle_one(each.get(), is_over))) {
            return false;
        }
    }
    for (const RecipeRef &each : found) {
        Locked lock(each->mover.get());
        if (!lock) {
            return false;
        }
        release_results(each.get(), changed);
    }
    return true;
}

} // namespace swapkit
