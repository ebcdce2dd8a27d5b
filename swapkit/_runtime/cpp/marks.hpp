// marks.hpp - what operators made, and what was chosen for it: the table of sites inside a module.
//
// A scope's choice holds for whatever is saved in it. A choice for one *operator* holds for what
// that operator made, wherever it is saved: so its results are marked when it has run
// (`marking.py`), by storage and version, and the hooks look here first. A mark says either how the
// storage is to be moved, or how its bytes are to be computed again: then a *recipe* stands for
// what is saved. The table keeps neither the storage nor the recipe alive: that belongs to the
// result.
//
// An operator that is recomputed needs what it was given in backward, so a swap of that would be in
// vain (it is *void*). Autograd saves an operator's operands before the operator is seen to run:
// while a thread watches its operators, marked storages, and those saved in a configuration's
// scope, are sent only at its next one.
#ifndef SWAPKIT_MARKS_HPP
#define SWAPKIT_MARKS_HPP

#include "mover.hpp"

namespace swapkit {

struct Mark {
    Ref<> recipe; // what computes it again; none: the terms say how it moves
    Terms terms;  // borrowed from `choice`
    Ref<> choice;
};

// Whether nothing is marked, so that nobody needs to look.
bool marks_are_empty();
// The storage of a tensor, borrowed, and its version. No storage: it has no plain memory.
Key key_of(c10::TensorImpl &tensor);
// The mark of a storage at a version. Neither recipe nor choice: there is none.
Mark find_mark(Key key);
// Send a group that was just saved and may turn out void, now or at this thread's next operator.
// `base`: the terms of the scope around, which hold if the swap turns out void; `is_new`: it was
// not saved before. False: an exception is set.
bool send_marked(Mover *mover, Group *group, const Terms &base, bool is_new);

extern PyMethodDef mark_functions[];

} // namespace swapkit

#endif
