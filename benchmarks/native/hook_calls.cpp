// hook_calls.cpp - nanoseconds for calls of the hooks, as an operator in C++ makes them.
#include <swapkit.hpp>

#include <ATen/ops/ones.h>

#include <chrono>
#include <vector>

namespace {

// Keep the compiler from moving calls out of the loop.
void step() { asm volatile("" ::: "memory"); }

template <class Body> double measure(int rounds, int calls, const Body &body) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; i++) {
        body();
        step();
    }
    std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    return taken.count() / rounds / calls;
}

} // namespace

extern "C" {

// The six calls of an operator with two operands and one output, in MindSpeed's shape.
double seed_ns(int rounds) {
    at::Tensor x = at::ones({1024}), weight = at::ones({1024}), y = at::ones({1024});
    auto &manager = swapkit::SwapManager::GetInstance();
    return measure(rounds, 6, [&] {
        manager.BeginHook("gmm_forward");
        manager.TensorHook(x);
        manager.TensorHook(weight);
        manager.TensorHook(y);
        manager.PostHook();
        manager.EndHook();
    });
}

// The same by a guard: its begin, three tensors, its end.
double guard_ns(int rounds) {
    at::Tensor x = at::ones({1024}), weight = at::ones({1024}), y = at::ones({1024});
    return measure(rounds, 5, [&] {
        swapkit::Operator op("gmm_forward");
        op.reads(x, weight);
        op.outputs(y);
    });
}

// The same in C, by addresses.
double c_ns(int rounds) {
    std::vector<char> memory(4096);
    return measure(rounds, 6, [&] {
        sk_op_begin("gmm_forward");
        sk_op_tensor(memory.data(), memory.size(), nullptr);
        sk_op_tensor(memory.data(), memory.size(), nullptr);
        sk_op_post();
        sk_op_tensor(memory.data(), memory.size(), nullptr);
        sk_op_end();
    });
}

} // extern "C"
