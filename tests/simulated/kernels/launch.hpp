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

// What is called of the driver, which is loaded by now.
struct Driver {
    decltype(&cusim_run) run;
    decltype(&cusim_break) fail;
    decltype(&cusim_last_refusal) refusal; // of this thread

    static const Driver &get() {
        static const Driver driver;
        return driver;
    }

  private:
    Driver() {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        TORCH_CHECK(driver != nullptr, "the simulated driver is not loaded");
        run = reinterpret_cast<decltype(run)>(dlsym(driver, "cusim_run"));
        fail = reinterpret_cast<decltype(fail)>(dlsym(driver, "cusim_break"));
        refusal = reinterpret_cast<decltype(refusal)>(dlsym(driver, "cusim_last_refusal"));
        TORCH_CHECK(run != nullptr && fail != nullptr && refusal != nullptr,
                    "the driver that is loaded is not the simulated one");
    }
};

// Operators beneath ours are no operators of the program: no autograd, no observers.
struct Beneath {
    at::AutoDispatchBelowADInplaceOrView below;
    at::DisableRecordFunctionGuard unseen;
};

// Made by the program, run by the driver. Whoever is to submit or run it shares it: work that a
// queue of the host drops is deleted, too.
struct Launch : std::enable_shared_from_this<Launch> {
    c10::OperatorHandle op;
    Slots slots;
    std::vector<Value> arguments;
    std::vector<Value> outputs; // empty: keep the results instead
    bool waits = false;
    bool done = false;
    Stack results;
    std::exception_ptr error;

    explicit Launch(c10::OperatorHandle handle) : op(std::move(handle)) {}

    Stack stack(const std::vector<at::Tensor> &tensors, at::DeviceType device) const {
        Stack made;
        for (const Value &value : arguments) {
            IValue built = value.build([&](size_t slot) { return tensors[slot]; });
            bool place = built.isDevice() && built.toDevice().type() == platform().device;
            made.push_back(place ? IValue(at::Device(device)) : std::move(built));
        }
        return made;
    }

    // Wait for nothing.
    void queue(const c10::Stream &stream) {
        slots.forget();
        put(stream);
    }

    void queue_and_wait(const c10::Stream &stream) {
        waits = true;
        put(stream);
        stream.synchronize();
        if (error) {
            std::rethrow_exception(error);
        }
        TORCH_CHECK(done, c10::toString(op.operator_name()), " was not run");
    }

  private:
    void put(const c10::Stream &stream) {
        CUstream handle = platform().handle(stream);
        platform().submit(op.operator_name().name,
                          [shared = shared_from_this(), handle] { return shared->submit(handle); });
    }

    CUresult submit(CUstream handle) {
        const auto &uses = slots.uses();
        auto share = std::make_unique<std::shared_ptr<Launch>>(shared_from_this());
        CUresult result = Driver::get().run(handle, run, share.get(), uses.data(), uses.size());
        if (result == kSuccess) {
            (void)share.release(); // the driver's until it ran
        }
        return result;
    }

    static void run(void *const *bytes, void *argument) {
        std::unique_ptr<std::shared_ptr<Launch>> share(
            static_cast<std::shared_ptr<Launch> *>(argument));
        Launch &launch = **share;
        launch.compute(bytes);
        if (launch.error && !launch.waits) {
            launch.report();
        }
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
            done = true;
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
        Driver::get().fail(platform().failed);
    }
};

} // namespace simulated
