// recipes.hpp - computing a group's bytes again, from what an operator was given.
//
// A *recipe* is one run of an operator: its arguments, with its operands as saved tensors. It is a
// second source of a group's bytes, beside a copy: such a group has no storage from the moment its
// operator has run, and gets one by running the operator again, below autograd, with the keys that
// the dispatcher had then, the settings, and the random numbers. The groups that a recipe makes own
// it.
//
// Operands may change later in ways that plain autograd would not mind, since it keeps the result.
// So a recipe is *settled* before an operator that is seen changes one of its operands: its groups
// take their storages, or are computed now, and need it no more. A change that nobody sees is
// noticed by the operand's version.
//
// All of it needs the interpreter and the runtime's lock, where nothing else is said. Functions
// that may fail return bool with false, and an exception is set.
#ifndef SWAPKIT_RECIPES_HPP
#define SWAPKIT_RECIPES_HPP

#include "recompute/recomputed.hpp"
#include "saved/pack_hooks.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace swapkit {

struct Region;

using Stack = torch::jit::Stack;

// An operator whose runs are seen (`capturing.hpp`). Kept for good.
struct Named {
    c10::OperatorHandle op;
    PyObject *function;    // the same in Python
    std::size_t arguments; // so many: a user's operator may be defined anew
    // What torch registered where our kernel is now: it chooses the backend by other arguments.
    std::optional<c10::SafeKernelFunction> former;
    std::vector<std::size_t> declared;   // arguments that it changes,
    std::vector<std::size_t> undeclared; // and does not say so: if the flag is on
    std::vector<std::size_t> barred;     // arguments with which it cannot be repeated
    std::ptrdiff_t flag;                 // the argument; -1: there is none
    std::ptrdiff_t chance;               // the argument without which nothing is random; likewise
    bool can_repeat, may_be_random;
    bool fills_saved; // it may fill what autograd has saved by then
    bool gives_view;  // a result is memory of an argument

    // Run it as if it were not seen.
    void run(c10::DispatchKeySet keys, Stack *stack) const;
    bool may_write() const { return !declared.empty() || !undeclared.empty(); }
    // Whether a call with these may draw random numbers.
    bool is_random(const c10::IValue *arguments) const;
    // Whether a call with these changes what is undeclared, too.
    bool is_training(const c10::IValue *arguments) const;
};

struct Operand {
    std::uint32_t argument; // of the operator,
    std::int32_t place;     // and where in its list; -1: it is the argument
    Ref<> packed;           // a handle, or what a recorder has instead
    bool is_scratch;        // it is written and not read: any memory will do
};

// How a result looked.
struct Layout {
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;
    c10::ScalarType dtype;
    bool operator==(const Layout &) const = default;
};

// One run of a user's region (`regions.hpp`), as its recipes know it.
struct Run {
    std::shared_ptr<Run> outer; // null: it is the outermost
    std::uint32_t depth;        // of which is 1
    std::int64_t task;          // the backward pass that has computed something of it again last
};

struct Recipe {
    const Named *named;
    Ref<Mover> mover;
    std::shared_ptr<Run> run; // null: no region's
    c10::DispatchKeySet keys;
    c10::impl::LocalDispatchKeySet local;
    bool wants_gradients;
    bool is_spare;   // what it makes is kept as long as there is memory (`standby.hpp`)
    bool is_chosen;  // a user has chosen it (`operator_choices.hpp`)
    bool is_over;    // an operand's bytes were overwritten unseen
    Stack arguments; // without tensors
    std::vector<Operand> operands;
    std::vector<const c10::StorageImpl *> reads; // of operands whose changes are seen
    std::uint64_t settings_word;
    Ref<> settings, random;       // in Python; random: none if no numbers were drawn
    std::vector<Group *> results; // borrowed; null: not wanted, or gone
    std::vector<Layout> layouts;
    std::size_t owners = 0; // of the results, and whoever works with it
};

// A hold on a recipe, or on none.
class RecipeRef {
  public:
    RecipeRef() = default;
    explicit RecipeRef(Recipe *recipe) : recipe_(recipe) { recipe_->owners++; }
    ~RecipeRef() {
        if (recipe_ != nullptr) {
            drop(recipe_);
        }
    }
    RecipeRef(RecipeRef &&other) noexcept : recipe_(std::exchange(other.recipe_, nullptr)) {}
    RecipeRef &operator=(RecipeRef &&other) noexcept {
        std::swap(recipe_, other.recipe_);
        return *this;
    }
    Recipe *get() const { return recipe_; }
    Recipe *operator->() const { return recipe_; }
    explicit operator bool() const { return recipe_ != nullptr; }

    // One owner less.
    static void drop(Recipe *recipe);

  private:
    Recipe *recipe_ = nullptr;
};

// While there is one of these, this thread's operators are parts of another one, or our own:
// nothing is captured.
class Deeper {
  public:
    Deeper() { depth()++; }
    ~Deeper() { depth()--; }
    Deeper(const Deeper &) = delete;
    Deeper &operator=(const Deeper &) = delete;
    static int &depth();
};

// Begin a recipe before its operator runs: take the tensors out of its arguments. None without an
// exception: this run cannot be repeated.
RecipeRef recipe_begin(const Named *named, c10::DispatchKeySet keys, const Stack &stack,
                       const Keeping &keeping);
// The tensors among what an operator is given, which has not run, and what it returned.
std::vector<at::Tensor> tensors_given(const Named *named, const Stack &stack);
std::vector<at::Tensor> tensors_made(const Named *named, const Stack &stack);
// Let groups have what the operator made, which has run now: those of `wanted`.
bool recipe_end(Recipe *recipe, const std::vector<at::Tensor> &made,
                const std::vector<bool> &wanted, const Terms &terms,
                std::vector<Ref<Group>> *groups_out);

// The handle of an operand that is read. Null: something else stands for it.
const Handle *handle_in(const Operand &operand);
Layout layout_of(const at::Tensor &tensor);
// Let a recipe's groups need it no more.
void consume(Recipe *recipe);
// Whether a group has no storage until its recipe runs. Not even one that somebody has kept: what
// torch does not see may have written to that since.
inline bool is_missing(const Group *group) {
    return is_recomputed(group) && group->storage == nullptr;
}

// Let a recipe be found by a storage that it reads, or makes; and by none any more.
void add_reader(Recipe *recipe, const c10::StorageImpl *storage);
void remove_reader(Recipe *recipe);
// The recipes of some storages. By now another storage may have the address of one that is gone.
std::vector<RecipeRef> find_readers(const std::vector<c10::StorageImpl *> &storages);

} // namespace swapkit

#endif
