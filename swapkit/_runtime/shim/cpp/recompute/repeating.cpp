// repeating.cpp - running recipes.
#include "recompute/recipes.hpp"

#include "held/held.hpp"
#include "memory/streams.hpp"
#include "recompute/repeat.hpp"
#include "running/operator_clock.hpp"
#include "saved/weights.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

// As torch/csrc/autograd/graph_task.h declares it, which takes long to compile.
namespace torch::autograd {
bool get_current_graph_task_keep_graph(); // NOLINT(readability-identifier-naming)
int get_current_graph_task_id();          // NOLINT(readability-identifier-naming)
} // namespace torch::autograd

namespace swapkit {

namespace {

// Unpack an operand with the session's hooks, as autograd would. Undefined: an exception is set.
at::Tensor told_now(const Recipe *recipe, Handle *handle) {
    using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    Ref<> given = Ref<>::steal(packer_use(handle->teller, as_object(handle)));
    c10::TensorImpl *impl = nullptr;
    if (!given || !impl_of(given.get(), &impl)) {
        return {};
    }
    if (!has_memory(*impl)) {
        (void)call(links.refuse_emptied, handle, recipe->named->function);
        return {};
    }
    return at::Tensor(Impl::reclaim_copy(impl));
}

// The tensor of an operand with a handle. Undefined: an exception is set.
at::Tensor handle_now(const Recipe *recipe, Handle *handle) {
    using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    if (!handle_is_intact(handle)) {
        (void)call(links.refuse_operand, handle, recipe->named->function);
        return {};
    }
    if (handle->weight != nullptr) {
        c10::TensorImpl *weight = handle_read(handle, recipe->named->function);
        return weight == nullptr ? at::Tensor() : at::Tensor(Impl::reclaim(weight));
    }
    bool is_used = is_in_backward();
    if (is_used && handle->teller != nullptr) {
        return told_now(recipe, handle);
    }
    if (!handle_bytes(handle)) {
        return {};
    }
    if (!has_memory(*handle->alias)) {
        (void)call(links.refuse_emptied, handle, recipe->named->function);
        return {};
    }
    // Not the alias itself: a rescue may strip it while the operator runs.
    return at::Tensor(Impl::reclaim(detached(handle->alias)));
}

// The tensor of an operand, for running the recipe. Undefined: an exception is set.
at::Tensor operand_now(const Recipe *recipe, const Operand &operand) {
    using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    if (Handle *handle = as_handle(operand.packed.get())) {
        const c10::TensorImpl &alias = *handle->alias;
        auto options = c10::TensorOptions().dtype(alias.dtype()).device(alias.device());
        at::Tensor tensor = operand.is_scratch
                                ? at::empty_strided(alias.sizes(), alias.strides(), options)
                                : handle_now(recipe, handle);
        return operand.is_written && tensor.defined() ? tensor.clone() : tensor;
    }
    Ref<> other = Ref<>::steal(unpack(operand.packed.get()));
    c10::TensorImpl *impl = nullptr;
    return other && impl_of(other.get(), &impl) ? at::Tensor(Impl::reclaim_copy(impl))
                                                : at::Tensor();
}

// Refuse an operand that other code has written to. False: an exception is set.
bool check_sample(const Recipe *recipe, const Operand &operand, const at::Tensor &tensor) {
    std::uint64_t sample = operand.sample == 0
                               ? 0
                               : sample_operand(operand.packed.get(), tensor.unsafeGetTensorImpl(),
                                                recipe->named->gives_written);
    if (sample == 0 || sample == operand.sample) {
        return true;
    }
    return static_cast<bool>(call(links.refuse_overwritten, recipe->named->function));
}

// Return the tensor of an operand, as `operand_now`. Bring that of a weight, which may be away: the
// operator runs below the trap.
at::Tensor bring_operand(const Recipe *recipe, const Operand &operand, HeldUses *weights) {
    const Handle *handle = handle_in(operand);
    bool is_anew = handle != nullptr && handle->weight != nullptr;
    if (handle != nullptr && !is_anew) {
        weights->add_again(*handle->alias);
        weights->bring();
    }
    at::Tensor tensor = operand_now(recipe, operand);
    if (is_anew && tensor.defined()) {
        weights->add_again(*tensor.unsafeGetTensorImpl());
        weights->bring();
    }
    return tensor;
}

bool fill_arguments(const Recipe *recipe, Stack *stack, HeldUses *weights) {
    *stack = recipe->arguments;
    for (std::size_t at = 0; at < stack->size(); at++) {
        if ((*stack)[at].isList()) {
            (*stack)[at] = (*stack)[at].toList().copy();
        }
    }
    for (const Operand &operand : recipe->operands) {
        at::Tensor tensor = bring_operand(recipe, operand, weights);
        if (!tensor.defined() || !check_sample(recipe, operand, tensor)) {
            return false;
        }
        c10::IValue &argument = (*stack)[operand.argument];
        if (operand.place < 0) {
            argument = std::move(tensor);
        } else {
            argument.toList().set(static_cast<std::size_t>(operand.place), std::move(tensor));
        }
    }
    return true;
}

bool run_again(const Recipe *recipe, Stack *stack) {
    Again settings, random;
    std::uint64_t now = settings_word(recipe->mover->device());
    if (now != recipe->settings_word && !settings.enter(recipe->settings.get())) {
        return false;
    }
    if (recipe->random && !random.enter(recipe->random.get())) {
        return false;
    }
    WithoutPython others;
    Deeper inside;
    c10::impl::ForceDispatchKeyGuard as_then(recipe->local);
    c10::AutoGradMode gradients(recipe->wants_gradients);
    recipe->named->run(recipe->keys, stack);
    return true;
}

// One run of a recipe, to be called from Python.
struct Rerun {
    const Recipe *recipe;
    const Stack *given;
    Stack *made;
};

Ref<> wrap_all(const std::vector<at::Tensor> &tensors) {
    return list_of(tensors, [](const at::Tensor &each) {
        return Ref<>::steal(wrap(each.unsafeGetTensorImpl()));
    });
}

PyObject *rerun(PyObject *self, PyObject *) {
    auto *body = static_cast<Rerun *>(PyCapsule_GetPointer(self, nullptr));
    if (body == nullptr) {
        return nullptr;
    }
    *body->made = *body->given;
    return run_again(body->recipe, body->made)
               ? wrap_all(tensors_made(body->recipe->named, *body->made)).release()
               : nullptr;
}

PyMethodDef rerun_method = {"rerun", shielded<rerun>, METH_NOARGS, nullptr};

// Run a recipe. A recorder must see the run of a region's recipe, since it is a part of the step.
bool run_seen(const Recipe *recipe, Stack *stack) {
    if (!recipe->run || !is_observed()) {
        return run_again(recipe, stack);
    }
    Stack made;
    Rerun body = {.recipe = recipe, .given = stack, .made = &made};
    Ref<> capsule = Ref<>::steal(PyCapsule_New(&body, nullptr, nullptr));
    Ref<> run = Ref<>::steal(capsule ? PyCFunction_New(&rerun_method, capsule.get()) : nullptr);
    Ref<> given = run ? wrap_all(last_tensors(*stack, stack->size())) : Ref<>();
    if (!call(links.repeat, recipe->named->function, given.get(), run.get())) {
        return false;
    }
    *stack = std::move(made);
    return true;
}

bool give(Recipe *recipe, Group *group, const at::Tensor &tensor, std::size_t result) {
    if (layout_of(tensor) != recipe->layouts[result] ||
        tensor.storage().nbytes() != group->nbytes) {
        Ref<> found = Ref<>::steal(wrap(tensor.unsafeGetTensorImpl()));
        return static_cast<bool>(call(links.refuse_mismatch, recipe->named->function, found.get()));
    }
    if (group->digest != nullptr) {
        Ref<> found = Ref<>::steal(wrap(tensor.unsafeGetTensorImpl()));
        if (!call(links.compare_digest, group->digest, recipe->named->function, found.get())) {
            return false;
        }
    }
    c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
    swapkit_storage_hold(storage);
    group_restore(group, storage);
    if (!recipe->run) {
        group->standby = recipe->is_spare ? Standby::spare : Standby::none;
    }
    group->stream = current_stream(recipe->mover->device());
    if (!recipe->run || group->terms.action != Action::keep) { // otherwise nothing looks it up
        enroll_again(recipe->mover.get(), group);
    }
    return true;
}

// Have recomputed groups released at the end of a backward pass that retains its graph. Used for
// recipes that no plan controls.
bool retain(const Recipe *recipe) {
    Books &books = *recipe->mover->books;
    bool is_first = books.retained.empty();
    for (Group *group : recipe->results) {
        if (group != nullptr && group->storage != nullptr && group->nhandles > 0) {
            books.retained.push_back(Ref<Group>::share(group));
        }
    }
    return !is_first || books.retained.empty() || call(links.pass_retains, recipe->mover.get());
}

// Count a recomputation: each operator, but a region only once per backward pass.
void count_run(const Recipe *recipe) {
    std::int64_t task = torch::autograd::get_current_graph_task_id();
    if (!recipe->run || std::exchange(recipe->run->task, task) != task || task == -1) {
        recipe->mover->repeated++;
    }
}

// The region's run that a group belongs to: its recipe's run or an enclosing one; null: none.
const Run *run_of(const Group *group) {
    const Run *run = group->recipe == nullptr ? nullptr : group->recipe->run.get();
    while (run != nullptr && run->depth > group->depth) {
        run = run->outer.get();
    }
    return run;
}

// Whether groups of `run` are only intermediates when `needing` is recomputed.
bool is_passing(const Run *run, const Run *needing) {
    while (needing != nullptr && run != nullptr && needing->depth > run->depth) {
        needing = needing->outer.get();
    }
    return run != nullptr && run != needing;
}

// Release operands of other regions that only this recipe needed.
void forget_operands(const Recipe *recipe, const Run *needing) {
    for (const Operand &operand : recipe->operands) {
        const Handle *handle = handle_in(operand);
        Group *group = handle == nullptr ? nullptr : handle->group;
        if (group != nullptr && group->nhandles == 1 && is_passing(run_of(group), needing)) {
            forget_computed(group->mover, group);
        }
    }
}

// Give storages to those of a recipe's groups that have none.
bool give_all(Recipe *recipe, const std::vector<at::Tensor> &made, const Run *needing,
              std::vector<Ref<Group>> *passing) {
    for (std::size_t at = 0; at < recipe->results.size(); at++) {
        auto group = Ref<Group>::share(recipe->results[at]);
        if (!group || group->storage != nullptr || group->nhandles == 0) {
            continue;
        }
        if (at >= made.size() || !give(recipe, group.get(), made[at], at)) {
            return false;
        }
        if (is_passing(run_of(group.get()), needing)) {
            passing->push_back(std::move(group));
        }
    }
    return true;
}

// Run a recipe's operator for a group of the run `needing`, and give storages to those of the
// recipe's groups that have none. `passing`: collects groups of other regions.
bool repeat(Recipe *recipe, const Run *needing, std::vector<Ref<Group>> *passing) {
    RecipeRef hold(recipe);
    if (recipe->is_over) {
        return static_cast<bool>(call(links.refuse_overwritten, recipe->named->function));
    }
    Stack stack;
    HeldUses weights;
    if (!fill_arguments(recipe, &stack, &weights) || !run_seen(recipe, &stack)) {
        return false;
    }
    count_run(recipe);
    std::size_t passed = passing->size();
    if (!give_all(recipe, tensors_made(recipe->named, stack), needing, passing)) {
        return false;
    }
    bool is_passed = passing->size() != passed;
    // If the graph is retained, another pass recomputes it.
    bool is_in_pass = is_in_backward();
    bool is_last = is_in_pass ? !torch::autograd::get_current_graph_task_keep_graph()
                              : !recipe->mover->books->is_early;
    if (is_last && !recipe->is_spare && !is_passed) { // a rescue may drop spare groups again
        consume(recipe);
    } else if (is_in_pass && !is_last && (recipe->run || recipe->is_chosen)) {
        return retain(recipe);
    }
    if (is_passed) {
        forget_operands(recipe, needing);
    }
    return true;
}

// The first operand that must be recomputed before a recipe can run; null: none.
Group *first_missing(Mover *mover, const Recipe *recipe) {
    for (const Operand &operand : recipe->operands) {
        const Handle *handle = handle_in(operand);
        if (handle != nullptr && handle->is_stripped && handle->group->mover == mover &&
            is_missing(handle->group)) {
            return handle->group;
        }
    }
    return nullptr;
}

void forget(Mover *mover, const std::vector<Ref<Group>> &groups) {
    for (const Ref<Group> &each : groups) {
        forget_computed(mover, each.get());
    }
}

// Note that a group of a region's run is recomputed.
void begin_run(Mover *mover, const Run *run) {
    while (run != nullptr && run->outer) {
        run = run->outer.get();
    }
    Books &books = *mover->books;
    std::int64_t task = torch::autograd::get_current_graph_task_id();
    bool is_other = run != nullptr && run != books.retained_run;
    if (is_other || task != books.retained_task) {
        forget_retained(mover); // of another region, or of a pass that raised
        books.retained_run = is_other ? run : books.retained_run;
        books.retained_task = task;
    }
}

} // namespace

bool compute_again(Mover *mover, Group *group) {
    const Run *needing = run_of(group);
    begin_run(mover, needing);
    // A stack: each entry needs the next one, and chains can have any length. An operand's storage
    // is held until its recipe has run, or a rescue could drop it to recompute another operand.
    struct Due {
        Ref<Group> group;
        std::vector<c10::Storage> held;
    };
    std::vector<Due> due;
    std::vector<Ref<Group>> passing;
    due.push_back({Ref<Group>::share(group), {}});
    while (!due.empty()) {
        Group *next = due.back().group.get();
        if (!is_missing(next)) {
            auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(next->storage);
            due.pop_back();
            if (!due.empty()) {
                due.back().held.emplace_back(std::move(storage));
            }
            continue;
        }
        if (Group *missing = first_missing(mover, next->recipe)) {
            due.push_back({Ref<Group>::share(missing), {}});
            continue;
        }
        bool is_passed = is_passing(run_of(next), needing);
        if (!repeat(next->recipe, needing, &passing)) {
            return false;
        }
        if (!is_passed) { // release the intermediates of other regions
            forget(mover, std::exchange(passing, {}));
        }
    }
    return true;
}

void sweep_retained(Mover *mover) {
    std::vector<Ref<Group>> &retained = mover->books->retained;
    auto is_used = [](const Ref<Group> &each) { return each->nhandles > 0; };
    if (std::all_of(retained.begin(), retained.end(), is_used)) {
        return;
    }
    // Dropping a group may end others and call this function again.
    std::vector<Ref<Group>> former = std::exchange(retained, {});
    for (Ref<Group> &each : former) {
        if (is_used(each)) {
            retained.push_back(std::move(each));
        }
    }
}

void forget_retained(Mover *mover) { forget(mover, std::exchange(mover->books->retained, {})); }

void forget_computed(Mover *mover, Group *group) {
    // Recompute even what a rescue has moved: a step must run as recorded.
    if (is_of_region(group) && group->recipe != nullptr && group->native != nullptr) {
        forget_copy(mover, group);
    }
    if (is_recomputed(group) && group->storage != nullptr) {
        group_strip(group);
        enroll_out(mover, group);
    }
}

} // namespace swapkit
