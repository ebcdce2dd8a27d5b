// tensors.cpp - tensors in Python, and torch's own objects of them.
#include "tensors.hpp"

#include "streams.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/TensorBase.h>
#include <c10/util/Exception.h>

namespace swapkit {

namespace {

at::TensorBase share(c10::TensorImpl *tensor) {
    return at::TensorBase(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
}

// Torch's function, whose header alone takes as long to compile as all of the shim. It takes the
// tensor by reference, and by value in older torch, which is called in the same way: by the address
// of the caller's own.
using Wrapper = PyObject *(*)(const at::TensorBase *);

Wrapper find_wrapper() {
    void *found = torchs_function(python_library, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
    if (found == nullptr) {
        found = torchs_function(python_library, "_Z16THPVariable_WrapN2at10TensorBaseE");
    }
    TORCH_CHECK(found != nullptr, "swapkit: this torch has no THPVariable_Wrap");
    return reinterpret_cast<Wrapper>(found);
}

using Translator = void (*)(const std::exception_ptr &);

// Likewise; null: this torch has another one.
Translator find_translator() {
    return reinterpret_cast<Translator>(torchs_function(
        python_library,
        "_ZN5torch29translate_exception_to_pythonERKNSt15__exception_ptr13exception_ptrE"));
}

} // namespace

void raise_current() {
    static const Translator translate = find_translator();
    if (translate != nullptr) {
        translate(std::current_exception());
        return;
    }
    try {
        throw;
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

bool impl_of(PyObject *tensor, c10::TensorImpl **out) {
    using at::impl::PythonTorchFunctionTLS;
    auto former = PythonTorchFunctionTLS::get_disabled_state();
    PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    Ref<> address = attribute<"_cdata">(tensor);
    PythonTorchFunctionTLS::set_disabled_state(former);
    *out = static_cast<c10::TensorImpl *>(address ? PyLong_AsVoidPtr(address.get()) : nullptr);
    return PyErr_Occurred() == nullptr;
}

PyObject *wrap(c10::TensorImpl *tensor) {
    static const Wrapper wrapper = find_wrapper();
    SWAPKIT_ASSERT(has_python());
    at::TensorBase shared = share(tensor);
    return wrapper(&shared);
}

bool gathers_gradients(c10::TensorImpl *tensor) {
    return tensor->requires_grad() && share(tensor).is_leaf();
}

bool views_leaf(c10::TensorImpl *tensor) {
    at::TensorBase shared = share(tensor);
    return shared.is_view() && shared._base().is_leaf();
}

c10::TensorImpl *detached(c10::TensorImpl *tensor) {
    return tensor->shallow_copy_and_detach(tensor->version_counter(), true).release();
}

} // namespace swapkit
