// storage_choices.hpp - what operators made, and what was chosen for it: the table of sites inside
// a module.
//
// A scope's choice holds for whatever is saved in it. A choice for one *operator* holds for what
// that operator made, wherever it is saved: so what is to be swapped is marked when it has run
// (`operator_choices.hpp`), by storage and version, and the hooks look here first. The table does
// not keep the storage alive.
//
// An operator that is recomputed needs what it was given in backward, so a swap of that would be in
// vain (it is *void*). Autograd saves an operator's operands before the operator is seen to run:
// while a thread watches its operators, marked storages, and those saved in a configuration's
// scope, are sent only at its next one that is chosen, or once autograd has made two nodes more:
// then the next one has run.
//
// All of it needs the interpreter; the thread's own are what it has saved and not sent.
#ifndef SWAPKIT_STORAGE_CHOICES_HPP
#define SWAPKIT_STORAGE_CHOICES_HPP

#include "moves/mover.hpp"

namespace swapkit {

struct Mark {
    Terms terms; // borrowed from `choice`
    Ref<> choice;
};

// Whether nothing is marked, so that nobody needs to look.
bool marks_are_empty();
// The storage of a tensor, borrowed, and its version. No storage: it has no plain memory.
Key key_of(c10::TensorImpl &tensor);
// The mark of a storage at a version. No choice: there is none.
Mark find_mark(Key key);
// Let terms hold for a storage at a version.
void add_mark(Key key, const Terms &terms);
// Let a storage not be swapped because of a mark. False: an exception is set.
bool void_swap(Key key);
// See this thread's operators from now on; or, as calls nest, not any more. False: likewise.
void watch_begin();
bool watch_end();
// Send what this thread has saved before its operator that runs now, and is not void; or what no
// operator that comes can make void. False: likewise.
bool send_pending();
bool send_passed();
// Send a group that was just saved and may turn out void, now or at this thread's next operator.
// `base`: the terms of the scope around, which hold if the swap turns out void; `is_new`: it was
// not saved before. False: an exception is set.
bool send_marked(Mover *mover, Group *group, const Terms &base, bool is_new);

extern PyMethodDef mark_functions[];

} // namespace swapkit

#endif
