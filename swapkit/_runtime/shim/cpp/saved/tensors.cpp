// tensors.cpp - tensors in Python, and their TensorImpls.
#include "saved/tensors.hpp"
#include "python/types.hpp"

#include "memory/descriptions.hpp"
#include "memory/storages.hpp"
#include "memory/streams.hpp"
#include "python/links.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// Declared as in torch/csrc/autograd/graph_task.h, which takes long to compile.
namespace torch::autograd {
int get_current_graph_task_id(); // NOLINT(readability-identifier-naming)
} // namespace torch::autograd

namespace swapkit {

namespace {

at::TensorBase share(c10::TensorImpl *tensor) {
    return at::TensorBase(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
}

// Torch's function; its header alone takes as long to compile as the whole shim. It takes the
// tensor by reference. In older torch it takes the tensor by value, but is called in the same way:
// with the address of the caller's object.
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

// The same for torch's exception translator; null: this torch has a different one.
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
    } catch (const c10::OutOfMemoryError &error) {
        PyErr_SetString(links.out_of_memory, error.what_without_backtrace());
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

namespace {

constexpr std::ptrdiff_t nowhere = -1;
// The position of the TensorImpl in torch's Python tensor objects, known once a tensor was seen.
// Only a large header of torch declares it.
std::ptrdiff_t held_at = nowhere;

c10::TensorImpl **words_of(PyObject *tensor) {
    return reinterpret_cast<c10::TensorImpl **>(tensor);
}

// Learn the position from a tensor, if its address occurs in its object exactly once.
void find_held(PyObject *tensor, const c10::TensorImpl *impl) {
    auto *type = reinterpret_cast<PyTypeObject *>(links.tensor)->tp_base;
    c10::TensorImpl **begin = words_of(tensor);
    c10::TensorImpl **end = begin + type->tp_basicsize / static_cast<Py_ssize_t>(sizeof *begin);
    c10::TensorImpl **found = std::find(begin, end, impl);
    if (found != end && std::find(found + 1, end, impl) == end) {
        held_at = found - begin;
    }
}

// Like `impl_of`, through Python.
bool ask_impl(PyObject *tensor, c10::TensorImpl **out) {
    using at::impl::PythonTorchFunctionTLS;
    auto former = PythonTorchFunctionTLS::get_disabled_state();
    PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    Ref<> address = attribute<"_cdata">(tensor);
    PythonTorchFunctionTLS::set_disabled_state(former);
    *out = static_cast<c10::TensorImpl *>(address ? PyLong_AsVoidPtr(address.get()) : nullptr);
    return PyErr_Occurred() == nullptr;
}

} // namespace

bool impl_of(PyObject *tensor, c10::TensorImpl **out) {
    PyObject *type = as_object(Py_TYPE(tensor));
    bool is_plain = type == links.tensor || type == links.parameter;
    if (is_plain && held_at != nowhere) {
        *out = words_of(tensor)[held_at];
        return true;
    }
    bool is_one = ask_impl(tensor, out);
    if (is_one && is_plain) {
        find_held(tensor, *out);
    }
    return is_one;
}

PyObject *wrap(c10::TensorImpl *tensor) {
    static const Wrapper wrapper = find_wrapper();
    SWAPKIT_ASSERT(has_python());
    at::TensorBase shared = share(tensor);
    return wrapper(&shared);
}

PyObject *wrap_owned(c10::TensorImpl *tensor) {
    PyObject *object = tensor == nullptr ? nullptr : wrap(tensor);
    if (tensor != nullptr) {
        c10::raw::intrusive_ptr::decref(tensor);
    }
    return object;
}

bool is_leaf(c10::TensorImpl *tensor) { return share(tensor).is_leaf(); }

bool gathers_gradients(c10::TensorImpl *tensor) {
    return tensor->requires_grad() && is_leaf(tensor);
}

bool views_leaf(c10::TensorImpl *tensor) {
    at::TensorBase shared = share(tensor);
    return shared.is_view() && shared._base().is_leaf();
}

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

namespace {

// Return the Python object of a view's base; none: the tensor is no view.
Ref<> base_of(c10::TensorImpl *tensor) {
    at::TensorBase shared = share(tensor);
    return shared.is_view() ? Ref<>::steal(wrap(shared._base().unsafeGetTensorImpl())) : Ref<>();
}

bool is_parameter(PyObject *tensor) {
    return PyType_IsSubtype(Py_TYPE(tensor), reinterpret_cast<PyTypeObject *>(links.parameter)) !=
           0;
}

} // namespace

bool views_parameter(c10::TensorImpl *tensor) {
    Ref<> base = base_of(tensor);
    return base && is_parameter(base.get());
}

c10::TensorImpl *weight_under(c10::TensorImpl *tensor) {
    at::TensorBase shared = share(tensor);
    c10::TensorImpl *leaf = shared.is_view() ? shared._base().unsafeGetTensorImpl() : tensor;
    if (!is_leaf(leaf) || gathers_gradients(leaf)) {
        return is_leaf(leaf) ? leaf : nullptr;
    }
    Ref<> object = Ref<>::steal(wrap(leaf));
    return object && is_parameter(object.get()) ? leaf : nullptr;
}

bool views_unknown(c10::TensorImpl *tensor) {
    Ref<> base = base_of(tensor);
    if (!base || as_object(Py_TYPE(base.get())) != links.tensor ||
        PyObject_HasAttr(base.get(), interned<"_is_param">()) != 0) {
        return true;
    }
    // Made in a function written in Python, such as `to_local` of a sharded weight.
    return tensor->requires_grad() && !share(tensor)._base().requires_grad();
}

// Return the address of a version counter; 0: there is none. Torch cannot compare version
// counters, but each is one pointer.
static std::uintptr_t address_of(const c10::VariableVersion &counter) {
    std::uintptr_t address = 0;
    static_assert(sizeof(c10::VariableVersion) == sizeof(address));
    std::memcpy(&address, static_cast<const void *>(&counter), sizeof(address));
    return address;
}

bool is_same_counter(const c10::VariableVersion &one, const c10::VariableVersion &other) {
    return address_of(one) == address_of(other);
}

bool shares_versions(const c10::TensorImpl *one, const c10::TensorImpl *other) {
    return is_same_counter(one->version_counter(), other->version_counter());
}

c10::TensorImpl *detached(c10::TensorImpl *tensor) {
    return detached(tensor, tensor->version_counter());
}

c10::TensorImpl *detached(c10::TensorImpl *tensor, const c10::VariableVersion &counter) {
    // Torch would run this in a dispatch mode, and pass the mode a Python number instead of the
    // tensor that wraps it.
    c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);
    return tensor->shallow_copy_and_detach(counter, true).release();
}

// has_plain_memory(tensor, least_bytes): return whether a tensor is plain (no subclass) and has a
// storage of at least `least_bytes` with memory. A stand-in for a tensor, as in a trace, has none.
static int has_plain_memory(PyObject *tensor, std::size_t least_bytes) {
    PyObject *type = as_object(Py_TYPE(tensor));
    if (type != links.tensor && type != links.parameter) {
        return 0;
    }
    c10::TensorImpl *impl;
    if (!impl_of(tensor, &impl)) {
        return -1;
    }
    const c10::StorageImpl *storage = plain_storage(*impl, least_bytes);
    return int{storage != nullptr && address_of(storage) != nullptr};
}

// Return a tuple of sizes.
static PyObject *sizes_tuple(const std::vector<std::int64_t> &sizes) {
    Ref<> list = list_of(sizes, for_python<std::int64_t>);
    return list ? PyList_AsTuple(list.get()) : nullptr;
}

// storage_description(tensor): return the sizes, strides, sizes of the storage, format and bytes of
// an item that the device's framework keeps for a tensor's storage. None: it keeps nothing.
static PyObject *storage_description(PyObject *tensor) {
    c10::TensorImpl *impl;
    if (!impl_of(tensor, &impl)) {
        return nullptr;
    }
    Description *description = impl->has_storage()
                                   ? description_of(impl->unsafe_storage().unsafeGetStorageImpl())
                                   : nullptr;
    if (description == nullptr) {
        Py_RETURN_NONE;
    }
    DescribedSizes found = described_sizes(description);
    description_free(description);
    return Py_BuildValue("NNNLn", sizes_tuple(found.sizes), sizes_tuple(found.strides),
                         sizes_tuple(found.storage_sizes), static_cast<long long>(found.format),
                         static_cast<Py_ssize_t>(found.item_bytes));
}

static const Functions tensor_functions{
    module_function<"storage_description", storage_description>(),
    module_function<"has_plain_memory", has_plain_memory>()};

} // namespace swapkit
