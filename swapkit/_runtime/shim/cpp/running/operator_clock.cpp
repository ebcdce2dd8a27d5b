// operator_clock.cpp - the clock of operators: autograd nodes, as they are made and as they run in
// backward.
//
// An operator is an autograd node, and its number is the node's sequence number: counted per
// thread, rising in forward and falling in backward, on whichever thread backward runs. Code that
// acts at an operator sets an alarm. Torch's observers run at every operator and compare two
// numbers; only an alarm that is due takes the GIL. A backward pass also records the order in which
// its nodes ran: nodes of branches without a gradient do not run at all.
#include "running/operator_clock.hpp"

#include "moves/prefetch.hpp"
#include "python/failures.hpp"
#include "python/links.hpp"

#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

constexpr std::size_t clocks_count = 32; // more threads share alarms, which is harmless
constexpr std::size_t record_limit = 1 << 20;
constexpr int most_tries = 8; // of a ring that signal handlers keep interrupting

struct Clock {
    std::atomic<std::int64_t> forward{never_forward};   // rings from this number on
    std::atomic<std::int64_t> backward{never_backward}; // rings from this number down
    std::atomic<std::int64_t> latest{-1};               // in backward
    std::mutex lock;
    std::vector<std::int64_t> record; // of the current backward pass, or the last one
};

std::array<Clock, clocks_count> clocks;

// A forked child's backward passes find the locks free. No other lock is taken while one is held.
void lock_clocks() {
    for (Clock &clock : clocks) {
        clock.lock.lock();
    }
}

void unlock_clocks() {
    for (Clock &clock : clocks) {
        clock.lock.unlock();
    }
}

[[maybe_unused]] const int clocks_at_fork =
    pthread_atfork(&lock_clocks, &unlock_clocks, &unlock_clocks);

thread_local int own_operators = 0;
at::CallbackHandle handle = 0; // our observer; 0: there is none. Guarded by the GIL
std::atomic<std::uint64_t> rings{0};

Clock &clock_of(std::uint64_t thread) { return clocks[thread % clocks_count]; }

// Note a failed ring. Return whether to try again: a signal handler interrupted the ring.
bool note_failure() {
    Ref<> failure = take_exception();
    Ref<> is_handled = call(links.note_failure, failure.get());
    if (!is_handled) {
        PyErr_WriteUnraisable(links.note_failure);
    }
    return is_handled.get() == Py_True;
}

// Like `timing_ring`, but an exception of torch becomes a Python exception.
bool ring_once(std::uint64_t thread, std::int64_t number, Phase phase) {
    try {
        return timing_ring(thread, number, phase);
    } catch (const std::exception &) {
        raise_current();
        return false;
    }
}

// Runs below C++ frames of torch: no exception may propagate through them.
void ring_now(std::uint64_t thread, std::int64_t number, Phase phase) {
    if (Py_IsInitialized() == 0) {
        return;
    }
    rings.fetch_add(1, std::memory_order_relaxed);
    WithPython python;
    OwnOperators ours;
    bool is_done = false;
    for (int tries = 0; tries < most_tries && !is_done; tries++) {
        is_done = ring_once(thread, number, phase) || !note_failure();
    }
}

void see_backward(const at::RecordFunction &operation) {
    std::int64_t number = operation.seqNr();
    if (number < 0) {
        return; // accumulates a gradient: not an operator of forward
    }
    std::uint64_t thread = operation.forwardThreadId();
    Clock &clock = clock_of(thread);
    bool is_start = number > clock.latest.exchange(number, std::memory_order_relaxed);
    if (is_start || number <= clock.backward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, is_start ? Phase::backward_start : Phase::backward);
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
    if (own_operators > 0) {
        return nullptr;
    }
    if (number >= clock_of(thread).forward.load(std::memory_order_relaxed)) {
        ring_now(thread, number, Phase::forward);
    }
    return nullptr;
}

} // namespace

void clock_start() {
    if (handle == 0) {
        handle = at::addGlobalCallback(at::RecordFunctionCallback(&see).scopes(
            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    }
}

std::uint64_t clock_thread() { return at::RecordFunction::currentThreadId(); }

std::size_t clock_number(std::uint64_t thread) { return thread % clocks_count; }

void clock_set(std::uint64_t thread, std::int64_t forward, std::int64_t backward) {
    Clock &clock = clock_of(thread);
    clock.forward.store(forward, std::memory_order_relaxed);
    clock.backward.store(backward, std::memory_order_relaxed);
}

std::vector<std::int64_t> clock_record(std::uint64_t thread) {
    Clock &clock = clock_of(thread);
    std::lock_guard<std::mutex> guard(clock.lock);
    return clock.record;
}

std::uint64_t clock_rings() { return rings.load(std::memory_order_relaxed); }

OwnOperators::OwnOperators() { own_operators++; }

OwnOperators::~OwnOperators() {
    own_operators--;
    SWAPKIT_ASSERT(own_operators >= 0);
}

} // namespace swapkit
