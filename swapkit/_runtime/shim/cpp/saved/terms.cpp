// terms.cpp - a scope's placement, read from Python.
#include "moves/mover.hpp"

#include <string_view>
#include <utility>

namespace swapkit {

namespace {

// Parse the value of an `Action` in Python; false: an exception is set.
bool action_read(PyObject *word, Action *out) {
    constexpr std::pair<std::string_view, Action> actions[] = {{"keep", Action::keep},
                                                               {"swap", Action::swap},
                                                               {"auto", Action::automatic},
                                                               {"pass", Action::pass}};
    const char *text = PyUnicode_AsUTF8(word);
    if (text == nullptr) {
        return false;
    }
    for (auto [name, action] : actions) {
        if (name == text) {
            *out = action;
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "expected the action keep, swap, auto or pass, not %R", word);
    return false;
}

} // namespace

bool terms_read(PyObject *placement, Terms *out) {
    Ref<> action = attribute<"action">(placement);
    Ref<> name = action ? attribute<"value">(action.get()) : Ref<>();
    Ref<> tier = name ? attribute<"tier">(placement) : Ref<>();
    Ref<> prefetch = tier ? attribute<"prefetch">(placement) : Ref<>();
    Ref<> least = prefetch ? attribute<"min_bytes">(placement) : Ref<>();
    Ref<> spares = least ? attribute<"spares_regions">(placement) : Ref<>();
    if (!spares || !action_read(name.get(), &out->action)) {
        return false;
    }
    out->tier = static_cast<sk_tier>(PyLong_AsLong(tier.get()));
    out->prefetch = prefetch.get() == Py_None ? no_prefetch : PyLong_AsLongLong(prefetch.get());
    out->min_bytes = PyLong_AsSize_t(least.get());
    out->spares = spares.get() == Py_True;
    if (PyErr_Occurred() != nullptr) {
        return false;
    }
    out->placement = Py_NewRef(placement);
    return true;
}

} // namespace swapkit
