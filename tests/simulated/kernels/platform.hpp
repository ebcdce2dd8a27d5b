// What differs between the simulated devices.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>

#define _Static_assert static_assert // as C++ calls it
extern "C" {
#include "driver/cusim.h"
}

namespace simulated {

// Puts work into a stream when it is called; returns what the driver answered.
using Submission = std::function<CUresult()>;

struct Platform {
    c10::DeviceType device;
    c10::DispatchKey key;
    const char *blocking; // the variable that makes every operator wait
    size_t over_read;     // a kernel may read so many bytes past a tensor's last
    CUresult failed;      // what a kernel that fails leaves behind
    // The handle of a stream; waits for nothing.
    CUstream (*handle)(const c10::Stream &stream);
    // Submit work to the current stream as the device's own operators are: at once, or by a queue
    // of the host. Throws when it is refused, then or later.
    void (*submit)(const std::string &name, Submission submission);
};

// Defined once in each library of operators.
const Platform &platform();

inline bool is_on_device(const at::Tensor &tensor) {
    return tensor.device().type() == platform().device;
}

} // namespace simulated
