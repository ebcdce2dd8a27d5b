// repeat.hpp - what decides which bits an operator makes besides its arguments, then and again.
#ifndef SWAPKIT_REPEAT_HPP
#define SWAPKIT_REPEAT_HPP

#include "python/links.hpp"

#include <c10/core/Device.h>

#include <cstdint>

namespace swapkit {

// Torch's settings that decide which bits an operator makes on a device, as one number. The
// thread's own count for the CPU only: autograd's threads, which run the backward of other devices,
// often have another one. `operators/settings.py` reads and sets them, and names the same ones.
std::uint64_t settings_word(c10::Device device);
// The settings of this moment in Python, whose number this is: one object for as long as they stay.
// None: an exception is set.
Ref<> settings_now(std::uint64_t word);

// Lets settings, or the state of generators, be as they were, and in the end as they are now.
class Again {
  public:
    // False: an exception is set.
    bool enter(PyObject *then) {
        Ref<> manager = Ref<>::steal(PyObject_CallOneArg(links.again, then));
        Ref<> done = manager ? call_method<"__enter__">(manager.get()) : Ref<>();
        if (done) {
            manager_ = std::move(manager);
        }
        return static_cast<bool>(done);
    }
    Again() = default;
    ~Again() {
        if (!manager_) {
            return;
        }
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (!call_method<"__exit__">(manager_.get(), Py_None, Py_None, Py_None)) {
            PyErr_WriteUnraisable(manager_.get());
        }
        PyErr_Restore(type, value, trace);
    }
    Again(const Again &) = delete;
    Again &operator=(const Again &) = delete;

  private:
    Ref<> manager_;
};

} // namespace swapkit

#endif
