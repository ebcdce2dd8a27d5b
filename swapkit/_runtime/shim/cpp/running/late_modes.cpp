// late_modes.cpp - dispatch modes of ours that change no bits.
//
// Torch's composite operators and derivatives ask whether the thread has a dispatch mode, and if so
// compute by another formula: the gradient of `prod` and a weighted `cross_entropy` then have other
// bits. So our modes are not on torch's stack between operators. Fake, a key that torch up to 2.15
// does not use, is included instead; its fallback puts the innermost mode there for one operator.
// The modes and the key are among the thread's settings that torch gives to autograd's threads.
#include "python/failures.hpp"
#include "python/types.hpp"
#include "saved/tensors.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

namespace swapkit {

namespace {

using at::impl::ThreadLocalPythonObjects;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;
using Stack = torch::jit::Stack;
using Mode = c10::impl::PyObject_TorchDispatchMode;

const std::string &place() {
    static const std::string name = "swapkit.modes";
    return name;
}

// This thread's modes, outermost first: a tuple, borrowed; null: none. With the GIL.
PyObject *modes_here() {
    if (!ThreadLocalPythonObjects::contains(place())) {
        return nullptr;
    }
    const auto &held = ThreadLocalPythonObjects::get(place());
    return held == nullptr ? nullptr : held->ptr(c10::impl::getGlobalPyInterpreter());
}

void set_modes(Ref<> modes) {
    bool has_any = PyTuple_GET_SIZE(modes.get()) != 0;
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, has_any);
    if (has_any) {
        auto *interpreter = c10::impl::getGlobalPyInterpreter();
        auto held = std::make_shared<c10::SafePyObject>(modes.release(), interpreter);
        ThreadLocalPythonObjects::set(place(), std::move(held));
    } else if (ThreadLocalPythonObjects::contains(place())) {
        ThreadLocalPythonObjects::set(place(), nullptr);
    }
}

// The innermost mode, on torch's stack while this lives; null: there is none.
class Shown : Unmovable {
  public:
    Shown() {
        WithPython python;
        PyObject *modes = modes_here();
        Py_ssize_t count = modes == nullptr ? 0 : PyTuple_GET_SIZE(modes);
        if (count == 0) {
            return;
        }
        auto mode = std::make_shared<Mode>(Py_NewRef(PyTuple_GET_ITEM(modes, count - 1)),
                                           c10::impl::getGlobalPyInterpreter());
        set_modes(Ref<>::steal(PyTuple_GetSlice(modes, 0, count - 1)));
        TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode));
        is_shown = true;
    }
    ~Shown() {
        if (is_shown) {
            WithPython python;
            auto mode = TorchDispatchModeTLS::pop_stack();
            PyObject *object = mode->ptr(c10::impl::getGlobalPyInterpreter());
            Ref<> last = Ref<>::steal(PyTuple_Pack(1, object));
            // Others may have been entered or left meanwhile.
            PyObject *modes = modes_here();
            set_modes(modes == nullptr ? std::move(last)
                                       : Ref<>::steal(PySequence_Concat(modes, last.get())));
        }
    }

    bool is_shown = false;
};

c10::OperatorHandle find(const char *name, const char *overload = "") {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// Torch makes objects of subclasses from the results of these operators, while it puts all modes of
// its stack aside: they must not be Python objects yet, as a mode's operands and results are. None
// of these touches memory.
bool gives_bare(const c10::OperatorHandle &op) {
    static const c10::OperatorHandle all[] = {find("aten::detach"), find("aten::alias"),
                                              find("aten::lift_fresh")};
    return std::find(std::begin(all), std::end(all), op) != std::end(all);
}

// Whether only the stack holds a tensor: with its Python object, which counts as one more holder.
bool is_alone(const at::Tensor &made) {
    WithPython python;
    Ref<> object = Ref<>::steal(wrap(made.unsafeGetTensorImpl()));
    return object && made.use_count() <= 2 && Py_REFCNT(object.get()) == 2;
}

// The same for new tensors, which a mode has seen: give them without their Python objects.
void make_bare(const c10::OperatorHandle &op, Stack *stack) {
    static const c10::OperatorHandle all[] = {find("aten::empty", "memory_format"),
                                              find("aten::_to_copy")};
    if (std::find(std::begin(all), std::end(all), op) == std::end(all) ||
        !stack->back().isTensor()) {
        return;
    }
    const at::Tensor &made = stack->back().toTensor();
    if (!made.requires_grad() && !made.key_set().has(DispatchKey::Python) && is_alone(made)) {
        c10::impl::ExcludeDispatchKeyGuard without_modes(DispatchKey::Python);
        stack->back() = made.variable_data();
    }
}

void show(const c10::OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    constexpr DispatchKeySet python({DispatchKey::PythonTLSSnapshot, DispatchKey::Python});
    bool is_hidden = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);
    if (!is_hidden && !gives_bare(op)) {
        Shown shown;
        if (shown.is_shown) {
            op.redispatchBoxed(python, stack);
            make_bare(op, stack);
            return;
        }
        // `InferenceMode` brings the keys of its beginning back: the modes have left in it.
        c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, false);
    }
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Fake), stack);
}

// late_modes(): return this thread's modes, outermost first.
PyObject *late_modes() {
    PyObject *modes = modes_here();
    return modes == nullptr ? PyTuple_New(0) : Py_NewRef(modes);
}

// set_late_modes(modes): replace this thread's modes. Return the number of the key Fake.
DispatchKey set_late_modes(Of<&PyTuple_Type> modes) {
    // Never unregistered: other threads may be inside the fallback. Raises if the key has another
    // one, which would keep operators from the modes without a word.
    static auto &registered =
        *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
            DispatchKey::Fake, c10::KernelFunction::makeFromBoxedFunction<&show>(),
            "swapkit: dispatch modes"));
    (void)registered;
    set_modes(Ref<>::share(modes.object));
    return DispatchKey::Fake;
}

const Functions late_mode_functions{module_function<"late_modes", late_modes>(),
                                    module_function<"set_late_modes", set_late_modes>()};

} // namespace

} // namespace swapkit
