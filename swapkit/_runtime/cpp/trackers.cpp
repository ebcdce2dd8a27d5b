// trackers.cpp - what is left of a tensor that is not kept: its version, and the address of its
// storage. Objects that the cyclic collector does not look at: each saved tensor that is computed
// again has some.
#include "saved.hpp"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace swapkit {

namespace {

// ---- versions -----------------------------------------------------------------------------------

struct Version {
    PyObject ob_base;
    c10::VariableVersion counter; // shared with the tensor
    std::uint32_t then;
};

std::uint32_t version_now(const c10::VariableVersion &counter) {
    return counter.enabled() ? counter.current_version() : 0; // tensors of inference count none
}

PyObject *version_make(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *tensor;
    c10::TensorImpl *impl = nullptr;
    if (PyArg_ParseTuple(args, "O:Version", &tensor) == 0 || !impl_of(tensor, &impl)) {
        return nullptr;
    }
    auto *version = reinterpret_cast<Version *>(type->tp_alloc(type, 0));
    if (version != nullptr) {
        new (&version->counter) c10::VariableVersion(impl->version_counter());
        version->then = version_now(version->counter);
    }
    return reinterpret_cast<PyObject *>(version);
}

void version_free(PyObject *self) {
    std::destroy_at(&reinterpret_cast<Version *>(self)->counter);
    Py_TYPE(self)->tp_free(self);
}

PyObject *get_now(PyObject *self, void *) {
    return PyLong_FromUnsignedLong(version_now(reinterpret_cast<Version *>(self)->counter));
}

PyMemberDef version_members[] = {
    {"then", T_UINT, offsetof(Version, then), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef version_properties[] = {
    {"now", get_now, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// ---- claims -------------------------------------------------------------------------------------

using Claims = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

struct Claim {
    PyObject ob_base;
    Claims storages;
};

PyObject *claim_make(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *argument;
    if (PyArg_ParseTuple(args, "O:Claim", &argument) == 0) {
        return nullptr;
    }
    Ref<> tensors = Ref<>::steal(PySequence_Fast(argument, "a sequence of tensors is needed"));
    if (!tensors) {
        return nullptr;
    }
    Claims storages;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(tensors.get()); at++) {
        c10::TensorImpl *impl = nullptr;
        if (!impl_of(PySequence_Fast_GET_ITEM(tensors.get(), at), &impl)) {
            return nullptr;
        }
        if (impl->has_storage()) {
            storages.push_back(impl->storage().getWeakStorageImpl());
        }
    }
    auto *claim = reinterpret_cast<Claim *>(type->tp_alloc(type, 0));
    if (claim != nullptr) {
        new (&claim->storages) Claims(std::move(storages));
    }
    return reinterpret_cast<PyObject *>(claim);
}

void claim_free(PyObject *self) {
    std::destroy_at(&reinterpret_cast<Claim *>(self)->storages);
    Py_TYPE(self)->tp_free(self);
}

} // namespace

PyTypeObject version_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Version",
    .tp_basicsize = sizeof(Version),
    .tp_dealloc = version_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The version of a tensor, then and now, without the tensor.",
    .tp_members = version_members,
    .tp_getset = version_properties,
    .tp_new = version_make,
};

PyTypeObject claim_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Claim",
    .tp_basicsize = sizeof(Claim),
    .tp_dealloc = claim_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Keeps the addresses of tensors' storages, though not their memory.",
    .tp_new = claim_make,
};

} // namespace swapkit
