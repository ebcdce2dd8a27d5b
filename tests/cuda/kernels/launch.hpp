// One operator on its way through the stream.

#pragma once

#include "kernels/slots.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>

#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <utility>

namespace simulated {

using torch::jit::Stack;

constexpr CUresult kSuccess = static_cast<CUresult>(0);
constexpr CUresult kAssert = static_cast<CUresult>(710); // what a failed assertion on a GPU leaves

// What is called of the driver and of the runtime, both of which are loaded by now.
struct Device {
    decltype(&cusim_run) run;
    decltype(&cusim_break) fail;
    int (*free)(void *);

    static const Device &get() {
        static const Device device;
        return device;
    }

  private:
    Device() {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        TORCH_CHECK(driver != nullptr, "the simulated driver is not loaded");
        run = reinterpret_cast<decltype(run)>(dlsym(driver, "cusim_run"));
        fail = reinterpret_cast<decltype(fail)>(dlsym(driver, "cusim_break"));
        free = reinterpret_cast<decltype(free)>(dlsym(RTLD_DEFAULT, "cudaFree"));
        TORCH_CHECK(run != nullptr && fail != nullptr && free != nullptr,
                    "the driver that is loaded is not the simulated one");
    }
};

// Operators beneath ours are no operators of the program: no autograd, no observers.
struct Beneath {
    at::AutoDispatchBelowADInplaceOrView below;
    at::DisableRecordFunctionGuard unseen;
};

// Made and queued by the program, run by the driver.
struct Launch {
    c10::OperatorHandle op;
    Slots slots;
    std::vector<Value> arguments;
    std::vector<Value> outputs; // empty: keep the results instead
    bool waits = false;
    Stack results;
    std::exception_ptr error;

    explicit Launch(c10::OperatorHandle handle) : op(std::move(handle)) {}

    static void run(void *const *bytes, void *argument) {
        auto *launch = static_cast<Launch *>(argument);
        if (launch->waits) {
            launch->compute(bytes);
            return;
        }
        std::unique_ptr<Launch> owned(launch);
        launch->compute(bytes);
        if (launch->error) {
            launch->report();
        }
    }

    Stack stack(const std::vector<at::Tensor> &tensors, at::DeviceType device) const {
        Stack made;
        for (const Value &value : arguments) {
            IValue built = value.build([&](size_t slot) { return tensors[slot]; });
            bool place = built.isDevice() && built.toDevice().is_cuda();
            made.push_back(place ? IValue(at::Device(device)) : std::move(built));
        }
        return made;
    }

    // Wait for nothing; the driver deletes the launch by running it.
    static void queue(std::unique_ptr<Launch> launch, const c10::Stream &stream) {
        launch->slots.forget();
        launch->put(stream);
        (void)launch.release();
    }

    void queue_and_wait(const c10::Stream &stream) {
        waits = true;
        put(stream);
        stream.synchronize();
        if (error) {
            std::rethrow_exception(error);
        }
    }

  private:
    void put(const c10::Stream &stream) {
        (void)Device::get().free(nullptr); // makes the thread's context
        const auto &uses = slots.uses();
        CUresult result = Device::get().run(static_cast<CUstream>(stream.native_handle()), run,
                                            this, uses.data(), uses.size());
        TORCH_CHECK(result == kSuccess, "CUDA error: the simulated driver refused ",
                    op.operator_name(), " with code ", static_cast<int>(result));
    }

    void compute(void *const *bytes) {
        try {
            Beneath beneath;
            std::vector<at::Tensor> tensors = slots.on_host(bytes);
            Stack values = stack(tensors, at::kCPU);
            op.callBoxed(&values);
            if (waits) {
                keep(values);
            } else {
                store(values, tensors);
            }
        } catch (...) {
            error = std::current_exception();
        }
    }

    void keep(const Stack &values) {
        for (const IValue &value : values) {
            // It may be a view of an argument, whose bytes are the device's.
            results.push_back(value.isTensor() && value.toTensor().defined()
                                  ? IValue(value.toTensor().clone())
                                  : value);
        }
    }

    void store(const Stack &values, const std::vector<at::Tensor> &tensors) const {
        for (size_t i = 0; i < outputs.size(); i++) {
            const Value &output = outputs[i];
            if (output.kind == Value::Kind::tensor && values[i].toTensor().defined()) {
                tensors[output.slots[0]].copy_(values[i].toTensor());
            } else if (output.kind == Value::Kind::list) {
                std::vector<at::Tensor> made = values[i].toTensorVector();
                for (size_t j = 0; j < made.size(); j++) {
                    tensors[output.slots[j]].copy_(made[j]);
                }
            }
        }
    }

    void report() const {
        try {
            std::rethrow_exception(error);
        } catch (const std::exception &reason) {
            (void)std::fprintf(stderr, "simulated kernel %s failed: %s\n",
                               c10::toString(op.operator_name()).c_str(), reason.what());
        } catch (...) {
            (void)std::fprintf(stderr, "simulated kernel failed\n");
        }
        Device::get().fail(kAssert);
    }
};

} // namespace simulated
