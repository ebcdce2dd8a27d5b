// regions.cpp - compiled regions, whose kernels read the addresses of weights.
#include "held/held.hpp"

#include "python/links.hpp"
#include "python/types.hpp"
#include "saved/tensors.hpp"

namespace swapkit {

namespace {

// Pin an operand of a region, if it is held. `written`: the places of operands that the region
// changes; None: not known. False: an exception is set.
bool add_operand(PyObject *operand, Py_ssize_t at, PyObject *written, HeldUses *uses) {
    c10::TensorImpl *impl = nullptr;
    if (PyObject_TypeCheck(operand, reinterpret_cast<PyTypeObject *>(links.tensor)) == 0) {
        return true;
    }
    if (!impl_of(operand, &impl)) {
        return false;
    }
    if (!is_trapped(*impl) || !impl->has_storage()) {
        return true;
    }
    Ref<> place = for_python(at);
    int is_written = place ? 1 : -1;
    if (place && written != Py_None) {
        is_written = PySequence_Contains(written, place.get());
    }
    if (is_written >= 0) {
        uses->add(impl->unsafe_storage().unsafeGetStorageImpl(), is_written == 1);
    }
    return is_written >= 0;
}

// Call a compiled region with its operands, a list that it empties, while the weights among them
// are here. `is_recorded`: a device graph has kept their addresses.
PyObject *run_region(PyObject *function, PyObject *region, PyObject *operands, PyObject *written,
                     bool is_recorded) {
    HeldUses uses(/*is_region=*/true);
    if (held_key() != c10::DispatchKey::Undefined) {
        // Not kept: the region frees its operands behind their last use.
        Ref<> given = Ref<>::steal(PySequence_Fast(operands, "a region has a list of operands"));
        if (!given) {
            return nullptr;
        }
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(given.get()); at++) {
            if (!add_operand(PySequence_Fast_GET_ITEM(given.get(), at), at, written, &uses)) {
                return nullptr;
            }
        }
    }
    if (is_recorded && !uses.is_empty()) {
        return PyErr_Format(PyExc_RuntimeError,
                            "swapkit: the weights of this compiled region leave the device and "
                            "come back elsewhere, but its CUDA graph has their addresses. Compile "
                            "it without CUDA graphs (without mode='reduce-overhead')");
    }
    uses.bring();
    Ref<> result;
    {
        Running counted(!uses.is_empty());
        result = Ref<>::steal(PyObject_CallFunctionObjArgs(function, region, operands, nullptr));
    }
    if (result) {
        uses.finish();
    }
    return result.release();
}

const Functions functions{module_function<"run_region", run_region>()};

} // namespace

} // namespace swapkit
