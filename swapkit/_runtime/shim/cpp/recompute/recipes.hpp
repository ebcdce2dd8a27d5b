// recipes.hpp - recomputing a group's bytes from the operands of an operator.
//
// A *recipe* is one run of an operator: its arguments, with its operands as saved tensors. It is
// the alternative to a copy as the source of a group's bytes. Such a group has no storage once its
// operator has run. It gets one by running the operator again below autograd, with the same
// dispatch keys, settings and random numbers. The groups that a recipe makes own the recipe.
//
// Operands may change later. Plain autograd would not mind, since it keeps the result. So a recipe
// is *settled* before a named operator changes one of its operands: its groups take their storages
// or are recomputed now, and do not need the recipe any more. A change by any other code is noticed
// by the operand's version.
//
// All functions need the GIL and the runtime's lock unless noted. Functions that may fail set an
// exception and return false.
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

// An operator whose runs are seen (`capturing.hpp`). Never freed.
struct Named {
    c10::OperatorHandle op;
    PyObject *function;    // the operator in Python
    std::size_t arguments; // their number: a user's operator may be redefined
    // The kernel of torch that ours replaces: it chooses the backend by other arguments.
    std::optional<c10::SafeKernelFunction> former;
    std::vector<std::size_t> declared;   // arguments that it changes by its schema
    std::vector<std::size_t> undeclared; // and in spite of it, if the flag is on
    std::vector<std::size_t> barred;     // arguments with which it cannot be repeated
    std::ptrdiff_t flag;                 // the training flag's argument; -1: none
    std::ptrdiff_t chance;               // the argument that is 0 if nothing is random; -1: none
    bool can_repeat, may_be_random;
    bool fills_saved;   // it may write to tensors that autograd has already saved
    bool gives_view;    // a result is a view of an argument
    bool moves_view;    // it changes an argument's sizes and strides, not its memory
    bool gives_written; // its results are the tensors that it changes,
    bool reads_written; // whose former bytes affect them

    // Its arguments on a stack, before it runs.
    const c10::IValue *given(const Stack &stack) const {
        return stack.data() + (stack.size() - arguments);
    }
    // Run the operator without our kernel.
    void run(c10::DispatchKeySet keys, Stack *stack) const;
    bool may_write() const { return !declared.empty() || !undeclared.empty(); }
    // Return whether a call with these arguments may draw random numbers.
    bool is_random(const c10::IValue *arguments) const;
    // Return whether a call with these arguments changes the undeclared ones.
    bool is_training(const c10::IValue *arguments) const;
};

struct Operand {
    std::uint32_t argument = 0; // position among the operator's arguments
    std::int32_t place = -1;    // position in a list argument; -1: not in a list
    Ref<> packed = {};          // a handle, or a recorder's object
    bool is_scratch = false;    // written and not read: any memory will do
    bool is_written = false;    // written and read: a copy is written
    std::uint64_t sample = 0;   // of its bytes (`sample_operand`); 0: none
};

// The layout of a result.
struct Layout {
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;
    c10::ScalarType dtype;
    bool operator==(const Layout &) const = default;
};

// One run of a user's region (`regions.hpp`), as its recipes know it.
struct Run {
    std::shared_ptr<Run> outer; // null: it is the outermost
    std::uint32_t depth;        // 1: the outermost
    std::int64_t task;          // the last backward pass that recomputed part of it
};

struct Recipe {
    const Named *named;
    Ref<Mover> mover;
    std::shared_ptr<Run> run; // null: not in a region
    c10::DispatchKeySet keys;
    c10::impl::LocalDispatchKeySet local;
    bool wants_gradients;
    bool is_spare;   // results are kept as long as there is memory (`standby.hpp`)
    bool is_chosen;  // a user has chosen it (`operator_choices.hpp`)
    bool is_over;    // without operands: consumed, or one was overwritten. It cannot run any more
    Stack arguments; // without tensors
    std::vector<Operand> operands;
    std::vector<const c10::StorageImpl *> reads; // storages under which `readers.cpp` has it
    std::uint64_t settings_word;
    Ref<> settings, random;       // Python objects; random: none if no numbers were drawn
    std::vector<Group *> results; // borrowed; null: not wanted, or destroyed
    std::vector<Layout> layouts;
    std::size_t owners = 0; // the results' groups and `RecipeRef`s
};

// A counted reference to a recipe, or to none.
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

    // Remove one owner.
    static void drop(Recipe *recipe);

  private:
    Recipe *recipe_ = nullptr;
};

// Begin a recipe before its operator runs: take the tensors out of the arguments. None without an
// exception: this run cannot be repeated.
RecipeRef recipe_begin(const Named *named, c10::DispatchKeySet keys, const Stack &stack,
                       const Keeping &keeping);
// The storages that an operator is about to change.
std::vector<c10::StorageImpl *> written_storages(const Named *named, const c10::IValue *arguments);
// The tensors among the last values of a stack.
std::vector<at::Tensor> last_tensors(const Stack &stack, std::size_t count);
// The tensors among the arguments of an operator before it runs, and among its results afterwards.
std::vector<at::Tensor> tensors_given(const Named *named, const Stack &stack);
std::vector<at::Tensor> tensors_made(const Named *named, const Stack &stack);
// Finish a recipe after its operator has run: make groups for the results in `wanted`.
bool recipe_end(Recipe *recipe, const std::vector<at::Tensor> &made,
                const std::vector<bool> &wanted, const Terms &terms,
                std::vector<Ref<Group>> *groups_out);

// The handle of an operand that is read. Null: scratch, or a recorder's object.
const Handle *handle_in(const Operand &operand);
Layout layout_of(const at::Tensor &tensor);
// Detach a recipe from all its groups, and drop its operands.
void consume(Recipe *recipe);
// Return whether a group has no storage until its recipe runs. A storage that is still alive
// elsewhere does not count: code that torch does not see may have written to it.
inline bool is_missing(const Group *group) {
    return is_recomputed(group) && group->storage == nullptr;
}

// Index a recipe by a storage that it reads or makes; remove a recipe from the index.
void add_reader(Recipe *recipe, const c10::StorageImpl *storage);
void remove_reader(Recipe *recipe);
// The recipes of some storages. Some may be wrong: a new storage can have a freed one's address.
std::vector<RecipeRef> find_readers(const std::vector<c10::StorageImpl *> &storages);

} // namespace swapkit

#endif
