// operator_choices.hpp - users' choices for the operators of the module that runs.
//
// While a module's own `forward` runs, its thread has a table of what users have chosen for which
// operators. What such an operator makes is marked, so that it is swapped wherever it is saved
// (`storage_choices.hpp`); or it is captured, as what a plan computes again is, and found by
// storage and version wherever that is saved, also in other modules, until the outermost *carrier*
// on the thread ends. Then what nobody has saved goes, with its operands.
//
// The operators of a module inside are none of its own; nor does anything hold in backward, where
// gradients are off, in regions, and where hooks of others see what is saved.
//
// What a thread has open is its own, and what another thread ends, as a generator's that it closes,
// it takes down itself. The counts of a table are guarded by the interpreter.
#ifndef SWAPKIT_OPERATOR_CHOICES_HPP
#define SWAPKIT_OPERATOR_CHOICES_HPP

#include "recompute/recipes.hpp"

#include <cstdint>
#include <vector>

namespace swapkit {

// What was chosen for some operators of a module.
struct Chosen {
    Terms terms; // how what they make moves, if it does; the choice is owned
    bool recomputes, swaps;
    std::uint64_t seen; // operators that ran
};

// `Choices(kinds, places)`: a table; and `Choosing(table, tracker, may_recompute)`: a context
// manager in which it holds, or which, without a table, only carries.
extern PyTypeObject choices_type, choosing_type;

// Whether anything may be chosen for what this thread runs. Without the interpreter.
bool is_anything_chosen();
// While a kernel has one of these, what holds here stays where it is: Python that runs meanwhile,
// of signal handlers or finalizers, may end it. Where something may be chosen.
class UsingChosen {
  public:
    explicit UsingChosen(const Named *named);
    ~UsingChosen();
    UsingChosen(const UsingChosen &) = delete;
    UsingChosen &operator=(const UsingChosen &) = delete;
};

// What holds for an operator that runs now, which is counted; null: nothing. Lives as long as its
// `UsingChosen`. Takes the interpreter only if the operator is in the table.
const Chosen *chosen_for(const Named *named, const Stack &stack);

// All of these need the interpreter.

// The hooks that what is saved now meets; null: those of others, or none.
Packer *choosing_packer();
// Get ready for an operator that is captured: nothing that it needs in backward is swapped because
// of a mark. Who moves the tensors of its device; null: nobody, or an exception is set. The lock is
// held.
Ref<Mover> prepare_chosen(const Named *named, Mover *mover, const Stack &stack);
// Let what was captured be found until the carrier ends. The lock is held.
void carry_chosen(std::vector<Ref<Group>> groups);
// Mark what an operator has made. `viewed`: what it was given, if it gives views of that.
void mark_chosen(const Chosen &chosen, const Named *named, const std::vector<at::Tensor> &viewed,
                 const Stack &stack);

extern PyMethodDef chosen_functions[];

} // namespace swapkit

#endif
