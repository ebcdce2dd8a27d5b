// tensors.hpp - tensors in Python, and torch's own objects of them.
//
// What every saved tensor pays for: an attribute of a tensor that is read through Python costs as
// much as all that is done here. All of it needs the interpreter.
#ifndef SWAPKIT_TENSORS_HPP
#define SWAPKIT_TENSORS_HPP

#include "python/python.hpp"

#include <c10/core/TensorImpl.h>

namespace swapkit {

// Torch's own object of a tensor in Python, borrowed. False: an exception is set.
bool impl_of(PyObject *tensor, c10::TensorImpl **out);
// The object in Python of a tensor. Null: an exception is set.
PyObject *wrap(c10::TensorImpl *tensor);

// Whether a tensor is a leaf that gathers gradients: its owner holds it anyway, and who gives it
// other `.data` means what is saved, too; as in plain autograd it is kept itself.
bool gathers_gradients(c10::TensorImpl *tensor);
// Whether a tensor is a view of a leaf, which may be a weight.
bool views_leaf(c10::TensorImpl *tensor);
// Of one that is: whether of a parameter, such as `weight.t()`;
bool views_parameter(c10::TensorImpl *tensor);
// or of what may be one by what Python knows of it.
bool views_unknown(c10::TensorImpl *tensor);

// Whether a backward pass runs on this thread.
bool is_in_backward();

// Whether a change of one of two tensors in place counts as one of the other, too. Pieces of a
// storage, as of `unsafe_chunk`, count by themselves.
bool shares_versions(const c10::TensorImpl *one, const c10::TensorImpl *other);

// A detached tensor with the same storage and the same version counter; the caller owns it. The
// tensor is plain (`storages.hpp`): the operator of this name would do no more, seen by nobody.
c10::TensorImpl *detached(c10::TensorImpl *tensor);

extern PyMethodDef tensor_functions[];

} // namespace swapkit

#endif
