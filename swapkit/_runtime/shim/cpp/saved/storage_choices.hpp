// storage_choices.hpp - choices for the results of operators, by storage.
//
// A scope's choice holds for every tensor saved in the scope. A choice for one *operator* holds for
// the operator's results, wherever they are saved. So a result to be swapped is marked after its
// operator has run (`operator_choices.hpp`), by storage and version, and the hooks look here first.
// The table does not keep the storage alive.
//
// A recomputed operator needs its inputs in backward, so swapping them would be useless (the swap
// is *void*). Autograd saves an operator's operands before the operator is seen to run. While a
// thread watches its operators, marked storages, and those saved in a configuration's scope, are
// therefore sent only at the thread's next chosen operator, or once autograd has made two more
// nodes: by then the next operator has run. A user's choice for an operator is void as a whole:
// from then on, no result of the operator in that module is marked.
//
// Everything here needs the GIL. The groups that a thread has saved and not sent are its own.
#ifndef SWAPKIT_STORAGE_CHOICES_HPP
#define SWAPKIT_STORAGE_CHOICES_HPP

#include "moves/mover.hpp"

namespace swapkit {

struct Mark {
    Terms terms; // borrowed from `choice`
    Ref<> placement;
};

// Return whether there are no marks, so that lookups can be skipped.
bool marks_are_empty();
// Return a tensor's storage, borrowed, and its version. No storage: it has no plain memory.
Key key_of(c10::TensorImpl &tensor);
// Return the mark of a storage at a version. No choice: there is none.
Mark find_mark(Key key);
// Mark a storage at a version with terms. `is_void`: set if the swap turns out void; lives as long
// as `owner`. Null: nothing depends on it.
void add_mark(Key key, const Terms &terms, PyObject *owner = nullptr, bool *is_void = nullptr);
// Remove a storage's mark, and withdraw a swap not yet sent: it is void. False: an exception is
// set.
bool void_swap(Key key);
// Start to watch this thread's operators; stop it (calls nest). False: an exception is set.
void watch_begin();
bool watch_end();
// Send the groups that this thread saved before its current operator and that are not void; or
// those that no later operator can make void. False: an exception is set.
bool send_pending();
bool send_passed();
// Send a group that was just saved and may turn out void: now, or at this thread's next operator.
// `base`: the terms of the surrounding scope, which hold if the swap turns out void; `is_new`: the
// group was not saved before. False: an exception is set.
bool send_marked(Mover *mover, Group *group, const Terms &base, bool is_new);

} // namespace swapkit

#endif
