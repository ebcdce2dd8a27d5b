// operator_choices.hpp - users' choices for the operators of the current module.
//
// While a module's own `forward` runs, its thread has a table with the user's choices by operator.
// To swap, the results of a chosen operator are marked: they are swapped wherever they are saved
// (`storage_choices.hpp`). To recompute, the run is captured, as for a plan. Its results are found
// by storage and version wherever they are saved, also in other modules, until the outermost
// *carrier* on the thread ends. Then results that were not saved are dropped, with their operands.
//
// The table does not hold for operators of submodules. No choice holds in backward, where gradients
// are off, in regions, and where hooks of another library see the saved tensors.
//
// Each thread has its own list of open tables. If another thread ends one (by closing a generator,
// for example), the owner removes it from its list later. The GIL guards a table's counts.
#ifndef SWAPKIT_OPERATOR_CHOICES_HPP
#define SWAPKIT_OPERATOR_CHOICES_HPP

#include "recompute/recipes.hpp"

#include <cstdint>
#include <vector>

namespace swapkit {

// A user's choice for an operator of a module.
struct Chosen {
    Terms terms; // how the results are swapped, if they are; borrowed from the table
    bool recomputes, swaps;
    std::size_t kind;     // of the table
    PyObject *table;      // borrowed
    std::uint64_t seen;   // runs of the operator
    mutable bool is_void; // whether a recomputed operator needed results, so that none are swapped
};

// `Choices(kinds, places)`: a table. `Choosing(table, tracker, may_recompute)`: a context manager
// in which the table holds. Without a table it is only a carrier.

// Return whether a table is open on this thread. Does not need the GIL.
bool is_anything_chosen();
// Keeps this thread's open tables alive while a kernel uses them: Python code that runs meanwhile
// (signal handlers, finalizers) may end them. Only where `is_anything_chosen`.
class UsingChosen : Unmovable {
  public:
    explicit UsingChosen(const Named *named);
    ~UsingChosen();
};

// Count an operator that runs now, and return the choice for it; null: none. Valid as long as the
// `UsingChosen` lives. Takes the GIL only if the operator is in the table.
const Chosen *chosen_for(const Named *named, const Stack &stack);

// The functions below need the GIL.

// The hooks that see what is saved now; null: there are none of ours, or no choice holds here.
Packer *choosing_packer();
// Prepare the capture of an operator: make sure that no mark swaps its operands, which backward
// needs. Returns the mover for its device; null: there is none, or an exception is set. The lock is
// held.
Ref<Mover> prepare_chosen(const Named *named, Mover *mover, const Stack &stack);
// Keep captured groups findable until the carrier ends. The lock is held.
void carry_chosen(std::vector<Ref<Group>> groups);
// Mark the results of an operator. `viewed`: its operands, if the results may be views of them.
void mark_chosen(const Chosen &chosen, const Named *named, const std::vector<at::Tensor> &viewed,
                 const Stack &stack);

} // namespace swapkit

#endif
