// wrappers.cpp - saved tensors whose class wraps other tensors, such as DTensor.
#include "saved/wrappers.hpp"

#include "running/operator_clock.hpp"
#include "saved/storage_choices.hpp"

#include <utility>

namespace swapkit {

namespace {

// Return a handle that `keep_inside` has made; null: an exception is set.
Handle *handle_inside_of(PyObject *object) {
    Handle *handle = as_handle(object);
    if (handle == nullptr || handle->watch == nullptr) {
        PyErr_Format(PyExc_TypeError, "expected a SavedTensor of a wrapper, not %R", object);
        return nullptr;
    }
    return handle;
}

} // namespace

Ref<> pack_wrapper(Packer *packer, PyObject *tensor) {
    auto none = Ref<>::share(Py_None);
    if (packer->is_inert != 0 || !packs_any(packer) ||
        PyObject_HasAttr(as_object(Py_TYPE(tensor)), interned<"__tensor_flatten__">()) == 0) {
        return none;
    }
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return {};
    }
    int may = impl->is_inference() ? 0 : may_move(packer->mover, impl, packer->terms);
    if (may != 1) {
        return may == 0 ? std::move(none) : Ref<>();
    }
    return call_unseen<"take_apart">(packer->mover->policy, tensor, packer);
}

bool pack_awaited(Packer *packer) {
    return packer->awaited == nullptr || PyList_GET_SIZE(packer->awaited) == 0 ||
           call_unseen<"pack_awaited">(packer->mover->policy, packer);
}

PyObject *packer_pack_inside(Packer *packer, PyObject *argument) {
    Handle *handle = handle_inside_of(argument);
    if (handle == nullptr) {
        return nullptr;
    }
    auto kept = Ref<>::share(argument);
    Ref<> tensor = Ref<>::steal(wrap_owned(detached(handle->alias)));
    const Watch watch = *handle->watch;
    const Meanwhile<const Watch *> wrapper(watch_around, &watch);
    Ref<> packed = tensor ? Ref<>::steal(packer_pack(packer, tensor.get())) : Ref<>();
    if (Handle *inside = as_handle(packed.get())) {
        handle_watch(inside, watch);
    }
    return packed.release();
}

// keep_inside(tensor, wrapper): return a handle for a plain tensor inside a wrapper.
static Handle *keep_inside(PyObject *tensor, PyObject *wrapper) {
    c10::TensorImpl *impl, *around;
    return impl_of(tensor, &impl) && impl_of(wrapper, &around) ? handle_inside(impl, around)
                                                               : nullptr;
}

// count_with(wrapper, handle): let a change in place of a new wrapper count as one of the wrapper
// that a handle was made for.
static bool count_with(PyObject *wrapper, PyObject *object) {
    c10::TensorImpl *impl;
    const Handle *handle = impl_of(wrapper, &impl) ? handle_inside_of(object) : nullptr;
    if (handle != nullptr) {
        impl->set_version_counter(handle->watch->counter);
    }
    return handle != nullptr;
}

static const Functions wrapper_functions{module_function<"keep_inside", keep_inside>(),
                                         module_function<"count_with", count_with>()};

} // namespace swapkit
