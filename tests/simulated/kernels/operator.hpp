// Operators of a simulated device's tensors, computed by torch's CPU kernels in the stream.
//
// Where a device would run a kernel, the simulated driver calls `Launch::run` on the thread of the
// stream, with pointers to the bytes of the device tensors. Everything around it is what it is on a
// device: outputs come from torch's allocator for it, the work is queued on the current stream and
// the host goes on, and nothing that is queued keeps its tensors alive. So a missing wait between
// two streams, or memory that is given away too early, shows as wrong numbers.
//
// The shapes of outputs are known before the work has run: torch's meta kernels tell them.
// Operators whose shapes depend on data, and those that return numbers, wait for the stream, as on
// a device. The variable `Platform::blocking` makes all of them wait, so that an error is raised
// where it belongs. Random numbers come from CPU generators, seeded from the state of the device's.

#pragma once

#include "kernels/launch.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>

#include <cstdlib>
#include <string>
#include <tuple>

namespace simulated {

constexpr uint64_t kOffsetStep = 4; // generators of devices count in fours

inline bool always_waits() {
    static const bool waits = [] {
        const char *value = std::getenv(platform().blocking);
        return value != nullptr && std::string(value) == "1";
    }();
    return waits;
}

// The running statistics of a batch norm are written although no schema says so.
inline bool is_written(const c10::Argument &argument) {
    const c10::AliasInfo *alias = argument.alias_info();
    if (alias == nullptr) {
        return argument.name().rfind("running_", 0) == 0;
    }
    const auto &parts = alias->containedTypes();
    return alias->isWrite() || (!parts.empty() && parts[0].isWrite());
}

inline Access access_of(const c10::Argument &argument) {
    if (!is_written(argument)) {
        return Access::read;
    }
    return argument.is_out() ? Access::write : Access::read_and_write;
}

// The argument that a result is, if it is one.
inline std::optional<size_t> aliased_argument(const c10::FunctionSchema &schema, size_t result) {
    const c10::AliasInfo *alias = schema.returns()[result].alias_info();
    if (alias == nullptr) {
        return std::nullopt;
    }
    for (size_t i = 0; i < schema.arguments().size(); i++) {
        const c10::AliasInfo *other = schema.arguments()[i].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
            return i;
        }
    }
    return std::nullopt;
}

// A generator of the host for one operator, by the state of the device's.
inline at::Generator host_generator(const IValue &argument, at::Device device) {
    at::Generator generator = argument.isGenerator() ? argument.toGenerator()
                                                     : at::globalContext().defaultGenerator(device);
    if (generator.device().is_cpu()) {
        return generator;
    }
    uint64_t offset = generator.get_offset();
    generator.set_offset(offset + kOffsetStep);
    uint64_t seed = generator.current_seed() * 0x9E3779B97F4A7C15U + offset;
    return at::make_generator<at::CPUGeneratorImpl>(seed);
}

inline std::optional<at::Device> device_of(const IValue &value) {
    if (value.isTensor() && value.toTensor().defined() && is_on_device(value.toTensor())) {
        return value.toTensor().device();
    }
    if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorVector()) {
            if (tensor.defined() && is_on_device(tensor)) {
                return tensor.device();
            }
        }
    }
    if (value.isDevice() && value.toDevice().type() == platform().device) {
        return value.toDevice();
    }
    return std::nullopt;
}

inline at::Device device_of(const Stack &arguments) {
    for (const IValue &value : arguments) {
        if (std::optional<at::Device> device = device_of(value)) {
            return device->has_index() ? *device
                                       : c10::impl::VirtualGuardImpl(platform().device).getDevice();
        }
    }
    return c10::impl::VirtualGuardImpl(platform().device).getDevice();
}

// Nothing but tensors come back, so that the host need not wait for them.
inline bool returns_tensors(const c10::FunctionSchema &schema) {
    for (const c10::Argument &result : schema.returns()) {
        bool tensors = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                       result.type()->isSubtypeOf(*c10::ListType::ofTensors());
        if (!tensors) {
            return false;
        }
    }
    return true;
}

template <typename Function> IValue map_tensors(const IValue &value, const Function &function) {
    if (value.isTensor()) {
        return function(value.toTensor());
    }
    if (!value.isTensorList()) {
        return value;
    }
    c10::List<at::Tensor> list;
    for (const at::Tensor &tensor : value.toTensorVector()) {
        list.push_back(function(tensor));
    }
    return list;
}

class Operator {
  public:
    Operator(const c10::OperatorHandle &op, Stack arguments)
        : op_(op), schema_(op.schema()), arguments_(std::move(arguments)),
          device_(device_of(arguments_)) {}

    Stack call() {
        Beneath beneath;
        c10::DeviceGuard guard(device_);
        c10::Stream stream = c10::impl::VirtualGuardImpl(platform().device).getStream(device_);
        auto launch = prepare();
        if (!always_waits() && returns_tensors(schema_)) {
            if (std::optional<Stack> predicted = predict(*launch)) {
                Stack results = allocate(*launch, *predicted);
                launch->queue(stream);
                return results;
            }
        }
        launch = prepare_to_wait();
        launch->queue_and_wait(stream);
        return bring_back(launch->results);
    }

  private:
    std::shared_ptr<Launch> prepare() {
        auto launch = std::make_shared<Launch>(op_);
        for (size_t i = 0; i < arguments_.size(); i++) {
            const c10::Argument &argument = schema_.arguments()[i];
            launch->arguments.push_back(
                make_value(launch->slots, arguments_[i], access_of(argument)));
            if (argument.type()->str().find("Generator") != std::string::npos) {
                launch->arguments.back().plain = generator(arguments_[i]);
            }
        }
        return launch;
    }

    // The same for each attempt: an operator moves the state of the device's generator once.
    at::Generator generator(const IValue &argument) {
        if (!generator_) {
            generator_ = host_generator(argument, device_);
        }
        return *generator_;
    }

    // Where the operator is to resize what it is given, it gets something of the host.
    std::shared_ptr<Launch> prepare_to_wait() {
        auto launch = prepare();
        for (size_t i = 0; i < arguments_.size(); i++) {
            if (is_empty_output(i)) {
                auto options = arguments_[i].toTensor().options().device(at::kCPU);
                launch->arguments[i].slots[0] =
                    launch->slots.add(at::empty({0}, options), Access::read);
            }
        }
        return launch;
    }

    bool is_empty_output(size_t i) const {
        const c10::Argument &argument = schema_.arguments()[i];
        if (!argument.kwarg_only() || !is_written(argument) || !arguments_[i].isTensor()) {
            return false;
        }
        const at::Tensor &tensor = arguments_[i].toTensor();
        return is_on_device(tensor) && tensor.numel() == 0;
    }

    // What the operator would return, without bytes.
    std::optional<Stack> predict(const Launch &launch) const {
        try {
            Stack values = launch.stack(launch.slots.on_meta(), at::kMeta);
            op_.callBoxed(&values);
            return values;
        } catch (const std::exception &) {
            return std::nullopt; // or a mistake of the caller's, which the CPU kernel will explain
        }
    }

    at::Tensor allocate_like(const at::Tensor &meta) const {
        return meta.defined()
                   ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_))
                   : at::Tensor();
    }

    Stack allocate(Launch &launch, const Stack &predicted) {
        Stack results;
        for (size_t i = 0; i < predicted.size(); i++) {
            std::optional<size_t> argument = aliased_argument(schema_, i);
            if (argument) {
                resize_queued(launch, *argument, predicted[i]);
                results.push_back(arguments_[*argument]);
                launch.outputs.emplace_back();
            } else {
                auto make = [this](const at::Tensor &meta) { return allocate_like(meta); };
                results.push_back(map_tensors(predicted[i], make));
                launch.outputs.push_back(make_value(launch.slots, results.back(), Access::write));
            }
        }
        return results;
    }

    // The slot that knew the tensor's former size must be made anew.
    void resize_queued(Launch &launch, size_t argument, const IValue &predicted) {
        if (predicted.isTensor() && resize(argument, predicted.toTensor())) {
            launch.slots.forget(arguments_[argument].toTensor());
            launch.arguments[argument] =
                make_value(launch.slots, arguments_[argument], Access::write);
        }
    }

    // Give a tensor the size the operator found out.
    bool resize(size_t argument, const at::Tensor &predicted) {
        if (!arguments_[argument].isTensor()) {
            return false;
        }
        at::Tensor tensor = arguments_[argument].toTensor();
        if (!tensor.defined() || tensor.sizes() == predicted.sizes()) {
            return false;
        }
        tensor.resize_(predicted.sizes());
        return true;
    }

    Stack bring_back(const Stack &values) {
        Stack results;
        for (size_t i = 0; i < values.size(); i++) {
            std::optional<size_t> argument = aliased_argument(schema_, i);
            if (!argument) {
                auto send = [this](const at::Tensor &tensor) { return bring_back(tensor); };
                results.push_back(map_tensors(values[i], send));
                continue;
            }
            if (values[i].isTensor() && resize(*argument, values[i].toTensor())) {
                arguments_[*argument].toTensor().copy_(values[i].toTensor());
            }
            results.push_back(arguments_[*argument]);
        }
        return results;
    }

    at::Tensor bring_back(const at::Tensor &tensor) const {
        if (!tensor.defined()) {
            return tensor;
        }
        at::Tensor result = allocate_like(tensor);
        result.copy_(tensor);
        return result;
    }

    const c10::OperatorHandle &op_;
    const c10::FunctionSchema &schema_;
    Stack arguments_;
    at::Device device_;
    std::optional<at::Generator> generator_;
};

inline void boxed(const c10::OperatorHandle &op, Stack *stack) {
    size_t count = op.schema().arguments().size();
    Stack results = Operator(op, torch::jit::pop(*stack, count)).call();
    for (IValue &result : results) {
        stack->push_back(std::move(result));
    }
}

// It takes no generator, so that the CPU kernel would use the host's.
inline std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor &input, double probability,
                                                  std::optional<bool> train) {
    if (train.has_value() && !*train) {
        return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    }
    double kept = 1 - probability;
    at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
    mask.bernoulli_(kept);
    return {input.mul(mask).mul_(kept == 0 ? 0.0 : 1 / kept), mask};
}

} // namespace simulated
