// tensors.hpp - tensors in Python, and their TensorImpls.
//
// Every saved tensor pays for these calls: one attribute read through Python costs as much as all
// of them. Everything here needs the GIL.
#ifndef SWAPKIT_TENSORS_HPP
#define SWAPKIT_TENSORS_HPP

#include "python/python.hpp"

#include <c10/core/TensorImpl.h>

namespace swapkit {

// Return the TensorImpl of a Python tensor, borrowed. False: an exception is set.
bool impl_of(PyObject *tensor, c10::TensorImpl **out);
// Return the Python object of a tensor. Null: an exception is set.
PyObject *wrap(c10::TensorImpl *tensor);
// The same for a reference that the caller gives up, and null for null.
PyObject *wrap_owned(c10::TensorImpl *tensor);

// Return whether a tensor is a leaf, with or without gradients. Autograd saves a leaf itself, not
// an alias: code that assigns its `.data` or its attributes means the saved tensor, too.
bool is_leaf(c10::TensorImpl *tensor);
// Return whether a tensor is a leaf that accumulates gradients. Its owner holds it anyway.
bool gathers_gradients(c10::TensorImpl *tensor);
// Return whether a tensor is a view of a leaf, which may be a weight.
bool views_leaf(c10::TensorImpl *tensor);
// Return whether a view of a leaf views a parameter, such as `weight.t()`;
bool views_parameter(c10::TensorImpl *tensor);
// or a leaf that may be one, judging by its Python object.
bool views_unknown(c10::TensorImpl *tensor);
// Return the weight that a tensor is or views, borrowed: a leaf that accumulates gradients, or a
// parameter. Null: none.
c10::TensorImpl *weight_under(c10::TensorImpl *tensor);

// Return whether a backward pass runs on this thread.
bool is_in_backward();

// Return whether an in-place change of one tensor counts as a change of the other. Pieces of a
// storage, such as those of `unsafe_chunk`, have their own counters.
bool shares_versions(const c10::TensorImpl *one, const c10::TensorImpl *other);
bool is_same_counter(const c10::VariableVersion &one, const c10::VariableVersion &other);

// Return a detached tensor with the same storage and version counter; the caller owns it. The
// tensor is plain (`storages.hpp`), so `detach` would do no more, and no mode sees this function.
c10::TensorImpl *detached(c10::TensorImpl *tensor);
// The same with another version counter.
c10::TensorImpl *detached(c10::TensorImpl *tensor, const c10::VariableVersion &counter);

} // namespace swapkit

#endif
