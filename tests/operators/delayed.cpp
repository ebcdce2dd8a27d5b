// delayed.cpp - the example's kernel with delays, and kernels that know only an address.
//
// While a kernel runs, it holds nothing but addresses of its operands: the extension's references
// are dropped, and `set_forgetting` names a function that drops the test's.
//
// Tests compile it in place of examples/operators/grouped_matmul.cpp, which they rename, together
// with gmm.cpp. They call the functions below through ctypes, without the GIL.
#define aclnnGroupedMatmulV2 multiply_at_once
#include "plain_grouped_matmul.cpp"
#undef aclnnGroupedMatmulV2

#include <NPUSwapManager.h>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

namespace {

std::atomic<int> most_delay_us{0};

void wait() {
    static std::atomic<unsigned> seed{0};
    thread_local std::minstd_rand random(++seed);
    int most = most_delay_us;
    if (most > 0) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(random() % static_cast<unsigned>(most)));
    }
}

thread_local void (*forgetting)() = nullptr;

void forget() {
    if (forgetting != nullptr) {
        forgetting();
    }
}

// The same memory, not held.
at::Tensor borrow(const at::Tensor &from) {
    return at::from_blob(from.data_ptr(), from.sizes(), from.options());
}

swapkit::SwapManager &manager() { return swapkit::SwapManager::GetInstance(); }

// Hooks an operand, and is left by an exception; the frame is far deeper than the caller's.
[[gnu::noinline]] void fail_hooked(const at::Tensor &operand) {
    volatile char deep[4096];
    deep[0] = 1;
    manager().BeginHook("failing");
    manager().TensorHook(operand);
    throw std::runtime_error(deep[0] == 1 ? "the kernel failed" : "");
}

[[gnu::noinline]] bool fails_hooked(const at::Tensor &operand) {
    try {
        fail_hooked(operand);
    } catch (const std::runtime_error &) {
        return true;
    }
    return false;
}

} // namespace

void aclnnGroupedMatmulV2(at::TensorList x, at::TensorList weight,
                          const std::vector<int64_t> &group_list, at::TensorList result) {
    const std::vector<at::Tensor> operands = {borrow(x[0])}, matrices = {borrow(weight[0])};
    const_cast<at::Tensor &>(x[0]).reset(); // the vectors are temporary ones, of the binding
    const_cast<at::Tensor &>(weight[0]).reset();
    forget();
    wait();
    multiply_at_once(operands, matrices, group_list, result);
    wait();
}

extern "C" {

void set_most_delay(int us) { most_delay_us = us; }

// What this thread's kernels call when they begin to run; null: nothing.
void set_forgetting(void (*function)()) { forgetting = function; }

// The sum of numbers at an address; an operator in C, hooked by `is_hooked`.
double sum_at(const float *numbers, size_t count, int is_hooked) {
    sk_op_memory memory = {numbers, count * sizeof *numbers, nullptr, true};
    uint64_t token = is_hooked ? sk_op_enter("sum_at") : 0;
    sk_op_operand(token, &memory);
    wait();
    double sum = 0;
    for (size_t at = 0; at < count; at++) {
        sum += numbers[at];
    }
    wait();
    sk_op_leave(token);
    return sum;
}

// Double the numbers at an address, in place, in the seed's form.
void double_at(float *numbers, size_t count) {
    sk_op_begin("double_at");
    sk_op_tensor(numbers, count * sizeof *numbers, nullptr);
    forget();
    wait();
    for (size_t at = 0; at < count; at++) {
        numbers[at] *= 2;
        if (at % (count / 4 + 1) == 0) {
            wait();
        }
    }
    sk_op_post();
    sk_op_end();
}

// The example's kernel without hooks. `ends`: where each group of rows ends.
void multiply_unhooked(const float *x, const float *weight, const int64_t *ends, size_t groups,
                       const int64_t *sizes, float *result) {
    const int64_t rows = sizes[0], k = sizes[1], n = sizes[2];
    const auto make = [](const float *at, at::IntArrayRef shape) {
        return at::from_blob(const_cast<float *>(at), shape, at::kFloat);
    };
    const std::vector<at::Tensor> operands = {make(x, {rows, k})};
    const std::vector<at::Tensor> matrices = {make(weight, {static_cast<int64_t>(groups), k, n})};
    const std::vector<at::Tensor> results = {make(result, {rows, n})};
    aclnnGroupedMatmulV2(operands, matrices, {ends, ends + groups}, results);
}

// Begin an operator and be left by an exception; return how many are open.
size_t fail_once() {
    (void)fails_hooked(at::ones({64}));
    return sk_op_depth();
}

// Fail `count` times inside operators in the seed's form; return how many stay open.
size_t fail_often(int count) {
    at::Tensor operand = at::ones({64});
    for (int i = 0; i < count; i++) {
        if (!fails_hooked(operand)) {
            return 0;
        }
    }
    size_t left_open = sk_op_depth();
    manager().BeginHook("after");
    manager().TensorHook(operand);
    manager().EndHook();
    return left_open + 100 * sk_op_depth();
}

// Leave an operator with a guard by an exception; return how many stay open.
size_t fail_guarded() {
    at::Tensor operand = at::ones({64});
    try {
        swapkit::Operator op("guarded");
        op.operands(operand, std::vector<at::Tensor>{operand}, std::optional<at::Tensor>());
        op.reads(at::Tensor());
        throw std::runtime_error("the kernel failed");
    } catch (const std::runtime_error &) {
        return sk_op_depth();
    }
}

// Hook a tensor whose memory was freed; return whether that raises.
int refuses_freed() {
    at::Tensor freed = at::ones({64});
    freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
    swapkit::Operator op("freed");
    try {
        op.operands(freed);
    } catch (const c10::Error &error) {
        return std::strstr(error.what(), "has no memory") != nullptr;
    }
    return 0;
}

// Hook a tensor whose memory was freed, in an operator or in none; return whether that raises.
int refuses_freed_hooked(bool is_begun) {
    at::Tensor freed = at::ones({64});
    freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
    if (is_begun) {
        manager().BeginHook("freed");
    }
    bool is_refused = false;
    try {
        manager().TensorHook(freed);
    } catch (const c10::Error &) {
        is_refused = true;
    }
    manager().EndHook();
    return is_refused;
}

// Operators within operators, over both forms; returns the depth inside, and 100 per depth after.
size_t nest() {
    at::Tensor operand = at::ones({64});
    swapkit::Operator outer("outer");
    outer.operands(operand);
    manager().BeginHook("middle");
    manager().TensorHook(operand);
    size_t inside = 0;
    {
        swapkit::Operator inner(std::string("inner"));
        inner.operands(operand);
        inside = sk_op_depth();
    }
    manager().EndHook();
    return inside + 100 * sk_op_depth();
}

} // extern "C"
