// repeat.hpp - settings and generator states that a repetition must restore to get the same bits.
#ifndef SWAPKIT_REPEAT_HPP
#define SWAPKIT_REPEAT_HPP

#include "python/links.hpp"

#include <c10/core/Device.h>

#include <cstdint>

namespace swapkit {

// Return torch's settings that affect the bits of an operator's result on a device, as one number.
// Per-thread settings are included for the CPU only: for other devices backward runs on autograd's
// threads, where they often differ. `operators/settings.py` reads and sets the same settings.
std::uint64_t settings_word(c10::Device device);
// Return the current settings, whose number is `word`, as a Python object. It is the same object
// until the settings change. None: an exception is set.
Ref<> settings_now(std::uint64_t word);

// Restores former settings or generator states while it lives, and then the current ones again.
class Again : Unmovable {
  public:
    // False: an exception is set.
    bool enter(PyObject *then) {
        Ref<> manager = call(links.again, then);
        Ref<> done = manager ? call_method<"__enter__">(manager.get()) : Ref<>();
        if (done) {
            manager_ = std::move(manager);
        }
        return static_cast<bool>(done);
    }
    ~Again() {
        if (!manager_) {
            return;
        }
        PutAside failure;
        if (!call_method<"__exit__">(manager_.get(), Py_None, Py_None, Py_None)) {
            PyErr_WriteUnraisable(manager_.get());
        }
    }

  private:
    Ref<> manager_;
};

} // namespace swapkit

#endif
