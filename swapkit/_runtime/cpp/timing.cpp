// timing.cpp - the alarms of planned swaps, by thread.
#include "timing.hpp"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

// A release follows its copy by so many times the distance of the copy back.
constexpr std::int64_t release_factor = 3;
// What is remembered at most: of threads, the most recent shapes of backward passes,
constexpr std::size_t threads_kept = 64, shapes_kept = 16;
// and, before dead ones are looked for, saves.
constexpr std::size_t saves_kept = 256;

// A group that does not stay for it: null once it has gone.
using Weak = std::shared_ptr<Group *>;

struct Leave {
    std::int64_t due;
    std::uint64_t order; // tells apart those that are due at once
    Weak group;

    bool operator<(const Leave &other) const { // of a heap: the soonest is on top
        return std::pair(due, order) > std::pair(other.due, other.order);
    }
};

struct Come {
    std::int64_t due;
    std::size_t at; // among all: of those that are due at once the latest comes first
    Weak group;
};

// What a backward pass looks like at its start: groups, and how far back they begin and end.
struct Shape {
    std::size_t groups;
    std::int64_t newest, oldest;
    bool operator==(const Shape &) const = default;
};

// The operators of a backward pass in their order, counted back from its start.
struct Order {
    Shape shape;
    std::vector<std::int64_t> deltas;
    std::unordered_map<std::int64_t, std::size_t> positions;
};

// The operators of one thread's forward passes.
struct Thread {
    std::vector<Leave> leaving; // a heap
    std::vector<Weak> saved;
    std::size_t most_saved = saves_kept;
    std::vector<Come> coming;   // the soonest last
    std::vector<Weak> waiting;  // those that were due but found no room
    std::vector<Order> orders;  // the latest last
    std::optional<Shape> shape; // of the pass under way
    std::int64_t start = 0;
    std::int64_t forward = never_forward, backward = never_backward; // where to be rung
};

void forget_dead(Thread &thread) {
    std::erase_if(thread.saved, [](const Weak &each) { return *each == nullptr; });
    thread.most_saved = std::max(saves_kept, 2 * thread.saved.size());
}

} // namespace

struct Timing {
    Mover *mover; // which owns it
    std::map<std::uint64_t, Thread> threads;
    std::uint64_t orders = 0;
};

namespace {

// Of all movers. Guarded by the interpreter.
std::vector<Timing *> &timings() {
    static auto *all = new std::vector<Timing *>; // for good: threads may outlive what is static
    return *all;
}

// Let a thread's clock ring where the first of those that share it wants it to.
void set_alarms(std::uint64_t number) {
    std::int64_t forward = never_forward, backward = never_backward;
    for (const Timing *timing : timings()) {
        for (const auto &[other, thread] : timing->threads) {
            if (clock_number(other) == clock_number(number)) {
                forward = std::min(forward, thread.forward);
                backward = std::max(backward, thread.backward);
            }
        }
    }
    clock_set(number, forward, backward);
}

std::int64_t next_release(const Thread &thread) {
    return thread.leaving.empty() ? never_forward : thread.leaving.front().due;
}

std::int64_t release_at(const Group *group) {
    return group->operation + release_factor * std::max<std::int64_t>(0, group->terms.prefetch);
}

void push(Thread &thread, Leave leave) {
    thread.leaving.push_back(std::move(leave));
    std::push_heap(thread.leaving.begin(), thread.leaving.end());
}

Thread &thread_of(Timing &timing, std::uint64_t number) {
    auto found = timing.threads.find(number);
    if (found != timing.threads.end()) {
        return found->second;
    }
    if (timing.threads.size() >= threads_kept) {
        for (auto each = timing.threads.begin(); each != timing.threads.end();) {
            forget_dead(each->second);
            each = each->second.saved.empty() ? timing.threads.erase(each) : std::next(each);
        }
    }
    return timing.threads[number];
}

// Whether somebody wants a trace of planned moves. -1: an exception is set.
int is_traced(const Mover *mover) {
    Ref<> runtime = attribute<"runtime">(mover->policy);
    Ref<> trace = runtime ? attribute<"trace">(runtime.get()) : Ref<>();
    return trace ? static_cast<int>(trace.get() != Py_None) : -1;
}

bool note(const Mover *mover, PyObject *kind, Group *group, std::int64_t number) {
    int traced = is_traced(mover);
    if (traced != 1) {
        return traced == 0;
    }
    Ref<> at = Ref<>::steal(PyLong_FromLongLong(number));
    return at && call_method<"note_move">(mover->policy, kind, as_object(group), at.get());
}

// ---- out ----------------------------------------------------------------------------------------

bool release_planned(Mover *mover, Group *group, std::int64_t number) {
    if (group_state(group) == SK_GROUP_RESIDENT && copy_out(mover, group) < 0) {
        return false; // else it has waited for neighbours, or for others to let go
    }
    if (group_state(group) == SK_GROUP_COPYING_OUT && finish_out(mover, group) < 0) {
        return false;
    }
    if (group_state(group) != SK_GROUP_CLEAN || group->storage == nullptr) {
        return true;
    }
    return release(mover, group) && note(mover, interned<"release">(), group, number);
}

bool release_due(Timing &timing, Thread &thread, std::int64_t number) {
    while (next_release(thread) <= number) {
        std::pop_heap(thread.leaving.begin(), thread.leaving.end());
        Leave leave = std::move(thread.leaving.back());
        thread.leaving.pop_back();
        auto group = Ref<Group>::share(*leave.group);
        if (!group || release_at(group.get()) > leave.due) {
            continue; // it was saved again
        }
        if (group_state(group.get()) == SK_GROUP_RESIDENT && !group_is_exclusive(group.get())) {
            // Others may write to it yet, and would keep its memory: at the next operator again.
            push(thread, {number + 1, ++timing.orders, std::move(leave.group)});
        } else if (!release_planned(timing.mover, group.get(), number)) {
            return false;
        }
    }
    return true;
}

// Release what forward did not come to, unless it is needed before it would have gone.
bool release_late(Timing &timing, Thread &thread, std::int64_t start) {
    auto is_later = [start](const Leave &each) {
        return *each.group != nullptr && (*each.group)->operation > start;
    };
    auto middle = std::partition(thread.leaving.begin(), thread.leaving.end(), is_later);
    std::vector<Leave> late(std::make_move_iterator(middle),
                            std::make_move_iterator(thread.leaving.end()));
    thread.leaving.erase(middle, thread.leaving.end());
    std::make_heap(thread.leaving.begin(), thread.leaving.end());
    std::unordered_set<const Group *> needed;
    for (const Come &each : thread.coming) {
        if (each.due >= start) {
            needed.insert(*each.group);
        }
    }
    std::sort(late.rbegin(), late.rend());
    for (const Leave &each : late) {
        auto group = Ref<Group>::share(*each.group);
        if (group && !needed.contains(group.get()) &&
            !release_planned(timing.mover, group.get(), start)) {
            return false;
        }
    }
    return true;
}

// ---- back ---------------------------------------------------------------------------------------

const Order *order_of(const Thread &thread) {
    auto found = std::find_if(thread.orders.begin(), thread.orders.end(),
                              [&](const Order &each) { return each.shape == thread.shape; });
    return found == thread.orders.end() ? nullptr : &*found;
}

// The operator at which a group's copy back starts; none: it is not used.
std::optional<std::int64_t> come_at(const Thread &thread, const Order *order, const Group *group) {
    std::int64_t distance = std::max<std::int64_t>(0, group->terms.prefetch);
    if (order == nullptr) {
        return group->operation + distance;
    }
    auto position = order->positions.find(thread.start - group->operation);
    if (position == order->positions.end()) {
        return std::nullopt; // in the pass before, no operator needed it
    }
    std::size_t ahead = std::min(position->second, static_cast<std::size_t>(distance));
    return thread.start - order->deltas[position->second - ahead];
}

// Plan the copies back of a backward pass that begins at an operator.
bool begin_backward(Timing &timing, Thread &thread, std::int64_t start) {
    std::erase_if(thread.saved, [](const Weak &each) { return *each == nullptr; });
    thread.start = start;
    thread.coming.clear();
    thread.waiting.clear();
    thread.shape.reset();
    std::vector<Weak> window;
    std::copy_if(thread.saved.begin(), thread.saved.end(), std::back_inserter(window),
                 [start](const Weak &each) { return (*each)->operation <= start; });
    if (window.empty()) {
        return true;
    }
    auto [oldest, newest] =
        std::minmax_element(window.begin(), window.end(), [](const Weak &one, const Weak &other) {
            return (*one)->operation < (*other)->operation;
        });
    thread.shape = Shape{.groups = window.size(),
                         .newest = start - (**newest)->operation,
                         .oldest = start - (**oldest)->operation};
    const Order *order = order_of(thread);
    for (const Weak &each : window) {
        std::optional<std::int64_t> due = come_at(thread, order, *each);
        if (due) {
            thread.coming.push_back({*due, thread.coming.size(), each});
        }
    }
    std::sort(thread.coming.begin(), thread.coming.end(), [](const Come &one, const Come &other) {
        return std::pair(one.due, one.at) < std::pair(other.due, other.at);
    });
    return release_late(timing, thread, start);
}

bool bring_due(Timing &timing, Thread &thread, std::int64_t number) {
    std::vector<Weak> due = std::exchange(thread.waiting, {});
    while (!thread.coming.empty() && thread.coming.back().due >= number) {
        due.push_back(std::move(thread.coming.back().group));
        thread.coming.pop_back();
    }
    for (const Weak &each : due) {
        auto group = Ref<Group>::share(*each);
        if (!group || group_state(group.get()) != SK_GROUP_OUT || group->storage != nullptr) {
            continue;
        }
        int started = bring_early(timing.mover, group.get());
        if (started < 0 ||
            (started == 1 && !note(timing.mover, interned<"prefetch">(), group.get(), number))) {
            return false;
        }
        if (started == 0) {
            thread.waiting.push_back(each);
        }
    }
    return true;
}

// Keep the order of the pass that ran last, instead of the one before that started alike.
void learn(std::uint64_t number, Thread &thread) {
    if (!thread.shape) {
        return;
    }
    Order order = {.shape = *thread.shape, .deltas = clock_record(number), .positions = {}};
    if (order.deltas.empty() || order.deltas.front() != thread.start) {
        return;
    }
    for (std::size_t at = 0; at < order.deltas.size(); at++) {
        order.deltas[at] = thread.start - order.deltas[at];
        order.positions[order.deltas[at]] = at;
    }
    std::erase_if(thread.orders, [&](const Order &each) { return each.shape == order.shape; });
    thread.orders.push_back(std::move(order));
    if (thread.orders.size() > shapes_kept) {
        thread.orders.erase(thread.orders.begin());
    }
}

// ---- when ---------------------------------------------------------------------------------------

// Do what is due on a thread.
bool ring(Timing &timing, std::uint64_t number, Thread &thread, std::int64_t at, Phase phase) {
    bool is_done = true;
    if (phase == Phase::forward) {
        is_done = release_due(timing, thread, at);
    } else if (phase == Phase::backward_start) {
        learn(number, thread);
        is_done = begin_backward(timing, thread, at);
    }
    if (phase != Phase::forward) {
        is_done = is_done && bring_due(timing, thread, at);
        // What found no room tries again at the next operator.
        thread.backward = !thread.waiting.empty() ? at
                          : thread.coming.empty() ? never_backward
                                                  : thread.coming.back().due;
    }
    if (phase != Phase::backward) {
        thread.forward = next_release(thread);
    }
    return is_done;
}

// The mover, if its alarms are among those that ring; it cannot go meanwhile.
Ref<Mover> mover_at(std::size_t at) {
    Mover *mover = timings()[at]->mover;
    return Ref<Mover>::share(mover->policy == nullptr ? nullptr : mover);
}

} // namespace

bool timing_saved(Mover *mover, Group *group) {
    if (mover->timing == nullptr) {
        mover->timing = new Timing{.mover = mover, .threads = {}};
        timings().push_back(mover->timing);
    }
    clock_start();
    std::uint64_t number = clock_thread();
    Thread &thread = thread_of(*mover->timing, number);
    group->operation = static_cast<std::int64_t>(at::sequence_number::peek()) - 1;
    if (group->timed == nullptr) {
        group->timed = new Weak(std::make_shared<Group *>(group));
    }
    const Weak &weak = *static_cast<Weak *>(group->timed);
    std::int64_t due = release_at(group);
    push(thread, {due, ++mover->timing->orders, weak});
    thread.saved.push_back(weak);
    if (thread.saved.size() > thread.most_saved) {
        forget_dead(thread);
    }
    if (next_release(thread) == due && thread.forward != due) {
        thread.forward = due;
        set_alarms(number);
    }
    int traced = is_traced(mover);
    return traced == 0 ||
           (traced == 1 && call_method<"note_planned">(mover->policy, as_object(group)));
}

void timing_forget(Group *group) {
    auto *weak = static_cast<Weak *>(std::exchange(group->timed, nullptr));
    if (weak != nullptr) {
        **weak = nullptr;
        delete weak;
    }
}

void timing_end(Mover *mover) {
    Timing *timing = std::exchange(mover->timing, nullptr);
    if (timing == nullptr) {
        return;
    }
    std::erase(timings(), timing);
    for (const auto &[number, thread] : timing->threads) {
        set_alarms(number);
    }
    delete timing;
}

bool timing_ring(std::uint64_t thread, std::int64_t number, Phase phase) {
    bool is_done = true;
    for (std::size_t at = 0; is_done && at < timings().size(); at++) {
        Ref<Mover> mover = mover_at(at);
        if (!mover) {
            continue;
        }
        Locked lock(mover.get());
        is_done = static_cast<bool>(lock);
        if (is_done &&
            mover->timing != nullptr) { // nobody has ended it while the lock was waited for
            auto found = mover->timing->threads.find(thread);
            is_done = found == mover->timing->threads.end() ||
                      ring(*mover->timing, thread, found->second, number, phase);
        }
    }
    set_alarms(thread);
    return is_done;
}

PyObject *timing_counts(const Mover *mover) {
    Ref<> list = Ref<>::steal(PyList_New(0));
    if (!list || mover->timing == nullptr) {
        return list.release();
    }
    for (const auto &[number, thread] : mover->timing->threads) {
        Ref<> counts =
            Ref<>::steal(Py_BuildValue("(nnn)", static_cast<Py_ssize_t>(thread.saved.size()),
                                       static_cast<Py_ssize_t>(thread.leaving.size()),
                                       static_cast<Py_ssize_t>(thread.orders.size())));
        if (!counts || PyList_Append(list.get(), counts.get()) != 0) {
            return nullptr;
        }
    }
    return list.release();
}

} // namespace swapkit
