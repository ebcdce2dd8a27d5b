// operators.cpp - the clock of operators: autograd's nodes, as they are made and as they run back.
//
// An operator is an autograd node, and its number the node's sequence number: counted per thread,
// rising through forward, and falling through backward, whichever thread that runs on. Whoever
// wants to act at an operator sets an alarm; torch's observers call in at every operator, compare
// two numbers, and only an alarm that is due reaches Python. Backward passes also leave a record of
// the order in which their nodes ran: nodes of branches that get no gradient do not run at all.
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr std::size_t clocks_count = 64; // more threads than that share alarms: no harm done
constexpr std::size_t record_limit = 1 << 20;
constexpr std::int64_t never_forward = INT64_MAX;
constexpr std::int64_t never_backward = -1;

using Ring = void (*)(std::uint64_t thread, std::int64_t number, int is_start);

struct Clock {
    std::atomic<std::int64_t> forward{never_forward};   // rings from this number on
    std::atomic<std::int64_t> backward{never_backward}; // rings from this number down
    std::atomic<std::int64_t> latest{-1};               // of backward
    std::mutex lock;
    std::vector<std::int64_t> record; // of the backward pass under way, or the last one
};

std::array<Clock, clocks_count> clocks;
std::atomic<Ring> ring{nullptr};
at::CallbackHandle handle = 0;

Clock &clock_of(std::uint64_t thread) { return clocks[thread % clocks_count]; }

void ring_now(std::uint64_t thread, std::int64_t number, int is_start) {
    Ring call = ring.load(std::memory_order_acquire);
    if (call != nullptr) {
        call(thread, number, is_start);
    }
}

void see_backward(const at::RecordFunction &operation) {
    std::int64_t number = operation.seqNr();
    if (number < 0) {
        return; // accumulates a gradient: no operator of the forward pass
    }
    std::uint64_t thread = operation.forwardThreadId();
    Clock &clock = clock_of(thread);
    bool is_start = number > clock.latest.exchange(number, std::memory_order_relaxed);
    if (is_start || number <= clock.backward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, is_start ? 1 : 0);
    }
    std::lock_guard<std::mutex> guard(clock.lock);
    if (is_start) {
        clock.record.clear();
    }
    if (clock.record.size() < record_limit) {
        clock.record.push_back(number);
    }
}

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction &operation) {
    if (operation.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        see_backward(operation);
        return nullptr;
    }
    std::int64_t number = operation.seqNr();
    std::uint64_t thread = operation.threadId();
    if (number >= clock_of(thread).forward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, -1);
    }
    return nullptr;
}

} // namespace

extern "C" {

// Call `call(thread, number, is_start)` when an alarm is due: is_start -1 in forward, 0 in
// backward, 1 at the first operator of a backward pass, whatever its alarm says.
void swapkit_clock_start(Ring call) {
    ring.store(call, std::memory_order_release);
    handle = at::addGlobalCallback(at::RecordFunctionCallback(&see).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

void swapkit_clock_stop() {
    at::removeCallback(handle);
    ring.store(nullptr, std::memory_order_release);
}

// The thread whose operators are counted where this is called.
std::uint64_t swapkit_clock_thread() { return at::RecordFunction::currentThreadId(); }

// Ring from `number` on in forward; never if it is negative.
void swapkit_clock_forward(std::uint64_t thread, std::int64_t number) {
    clock_of(thread).forward.store(number < 0 ? never_forward : number);
}

// Ring from `number` down in backward; never if it is negative.
void swapkit_clock_backward(std::uint64_t thread, std::int64_t number) {
    clock_of(thread).backward.store(number);
}

// Copy up to `capacity` numbers of the latest backward pass, in the order in which it ran them;
// returns how many there are.
std::size_t swapkit_clock_record(std::uint64_t thread, std::int64_t *out, std::size_t capacity) {
    Clock &clock = clock_of(thread);
    std::lock_guard<std::mutex> guard(clock.lock);
    for (std::size_t i = 0; i < clock.record.size() && i < capacity; i++) {
        out[i] = clock.record[i];
    }
    return clock.record.size();
}

} // extern "C"
