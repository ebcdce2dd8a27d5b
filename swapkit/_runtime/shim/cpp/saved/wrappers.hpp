// wrappers.hpp - saved tensors whose class wraps other tensors, such as DTensor.
//
// A wrapper has no memory of its own. Python takes it apart (`saved/taken_apart.py`), and each
// plain tensor inside is packed as if autograd had saved it: it is one event of a session's step,
// and the wrapper itself is none. All of this needs the GIL.
#ifndef SWAPKIT_WRAPPERS_HPP
#define SWAPKIT_WRAPPERS_HPP

#include "saved/pack_hooks.hpp"

namespace swapkit {

// Return whether a tensor may be a wrapper, by its type.
inline bool may_wrap(PyObject *tensor) {
    PyObject *type = as_object(Py_TYPE(tensor));
    return type != links.tensor && type != links.parameter;
}

// Return the object that stands for a saved wrapper. None: the tensor is none, or stays whole.
// Null: an exception is set.
Ref<> pack_wrapper(Packer *packer, PyObject *tensor);

// Pack the tensors that could not be packed yet, since a collective was writing to them. False: an
// exception is set.
bool pack_awaited(Packer *packer);

// Pack the tensor of a handle that `keep_inside` has made.
PyObject *packer_pack_inside(Packer *packer, PyObject *handle);

} // namespace swapkit

#endif
