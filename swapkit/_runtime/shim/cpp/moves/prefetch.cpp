// prefetch.cpp - the operators at which moves are due, by thread.
#include "moves/prefetch.hpp"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

// The distance from save to release, as a multiple of the prefetch distance.
constexpr std::int64_t release_factor = 3;
// Limits: threads, and the most recent shapes of backward passes per thread.
constexpr std::size_t threads_kept = 64, shapes_kept = 16;

// A backward pass at its start: the number of groups, and the distances to the newest and oldest.
struct Shape {
    std::size_t groups;
    std::int64_t newest, oldest;
    bool operator==(const Shape &) const = default;
};

// The operators of a backward pass in order, as distances from its start.
struct Order {
    Shape shape;
    std::vector<std::int64_t> deltas;
    std::unordered_map<std::int64_t, std::size_t> positions;
};

// The operators of one thread's forward passes.
struct Thread {
    BySerial saved;
    std::vector<Order> orders;  // the latest last
    std::optional<Shape> shape; // of the current pass
    std::int64_t start = 0;
    std::int64_t forward = never_forward, backward = never_backward; // alarms
};

} // namespace

struct Timing {
    Mover *mover; // which owns it
    std::map<std::uint64_t, Thread> threads;
};

namespace {

// The timings of all movers. Guarded by the GIL.
std::vector<Timing *> &timings() {
    static auto *all = new std::vector<Timing *>; // never freed: threads may outlive statics
    return *all;
}

// Set a clock to ring at the earliest alarm of all threads that share it.
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

std::int64_t release_at(const Group *group) {
    return group->operation + release_factor * std::max<std::int64_t>(0, group->terms.prefetch);
}

Thread &thread_of(Timing &timing, std::uint64_t number) {
    if (timing.threads.size() >= threads_kept && !timing.threads.contains(number)) {
        std::map<std::uint64_t, Schedule> &schedules = timing.mover->books->agenda.threads;
        std::erase_if(timing.threads, [](const auto &each) { return each.second.saved.empty(); });
        std::erase_if(schedules, [](const auto &each) {
            return each.second.ends.empty() && each.second.arrivals.empty();
        });
    }
    return timing.threads[number];
}

// The arrival of a group timed by operators, before its operator is known.
Arrival used_by(std::uint64_t number) {
    return {.when = ComeAt::use, .at = {.clock = number, .number = 0, .order = 0}};
}

// Whether planned moves are traced. -1: an exception is set.
int is_traced(const Mover *mover) {
    Ref<> shared = attribute<"shared">(mover->policy);
    Ref<> trace = shared ? attribute<"trace">(shared.get()) : Ref<>();
    return trace ? static_cast<int>(trace.get() != Py_None) : -1;
}

// ---- leaving ------------------------------------------------------------------------------------

// Release the groups whose release forward did not reach, except those that are due back already.
bool release_late(Timing &timing, std::uint64_t number, std::int64_t start) {
    Mover *mover = timing.mover;
    std::vector<Ref<Group>> late;
    for (const auto &[point, group] : mover->books->agenda.schedule(number).ends) {
        const Arrival &arrival = group->arrival;
        bool is_needed = arrival.when == ComeAt::point && arrival.at.number <= -start;
        if (group->operation <= start && !is_needed) {
            late.push_back(Ref<Group>::share(group));
        }
    }
    for (const Ref<Group> &group : late) {
        if (!agenda_release_now(mover, group.get()) ||
            !timing_note(mover, number, interned<"release">(), group.get(), start)) {
            return false;
        }
    }
    return true;
}

// ---- coming back --------------------------------------------------------------------------------

const Order *order_of(const Thread &thread) {
    auto found = std::find_if(thread.orders.begin(), thread.orders.end(),
                              [&](const Order &each) { return each.shape == thread.shape; });
    return found == thread.orders.end() ? nullptr : &*found;
}

// The operator at which a group's copy back starts; none: backward does not use the group.
std::optional<std::int64_t> come_at(const Thread &thread, const Order *order, const Group *group) {
    std::int64_t distance = std::max<std::int64_t>(0, group->terms.prefetch);
    if (order == nullptr) {
        return group->operation + distance;
    }
    auto position = order->positions.find(thread.start - group->operation);
    if (position == order->positions.end()) {
        return std::nullopt; // its operator did not run in the previous pass
    }
    std::size_t ahead = std::min(position->second, static_cast<std::size_t>(distance));
    return thread.start - order->deltas[position->second - ahead];
}

// Schedule the copies back for a backward pass that begins at operator `start`.
void plan_arrivals(Timing &timing, Thread &thread, std::uint64_t number, std::int64_t start) {
    thread.start = start;
    thread.shape.reset();
    std::vector<Group *> window;
    for (auto [serial, group] : thread.saved) {
        agenda_arrive(timing.mover, group, used_by(number));
        if (group->operation <= start) {
            window.push_back(group);
        }
    }
    if (window.empty()) {
        return;
    }
    auto [oldest, newest] =
        std::minmax_element(window.begin(), window.end(), [](const Group *one, const Group *other) {
            return one->operation < other->operation;
        });
    thread.shape = Shape{.groups = window.size(),
                         .newest = start - (*newest)->operation,
                         .oldest = start - (*oldest)->operation};
    const Order *order = order_of(thread);
    for (Group *group : window) {
        std::optional<std::int64_t> due = come_at(thread, order, group);
        if (due) { // at one operator, the group saved last comes first
            Point at = {.clock = number, .number = -*due, .order = ~group->serial};
            agenda_arrive(timing.mover, group, {.when = ComeAt::point, .at = at});
        }
    }
}

// Keep the order of the last pass. It replaces the order of a pass with the same shape.
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

// ---- alarms -------------------------------------------------------------------------------------

// Do the moves that are due on a thread.
bool ring(Timing &timing, std::uint64_t number, Thread &thread, std::int64_t at, Phase phase) {
    Mover *mover = timing.mover;
    bool is_done = true;
    if (phase == Phase::forward) {
        is_done = agenda_release_due(mover, number, at);
    } else if (phase == Phase::backward_start) {
        learn(number, thread);
        plan_arrivals(timing, thread, number, at);
        is_done = release_late(timing, number, at);
    }
    if (phase != Phase::forward) {
        is_done = is_done && agenda_bring_due(mover, number, -at) >= 0;
    }
    const Schedule &schedule = mover->books->agenda.schedule(number);
    if (phase != Phase::forward) { // groups that found no room try again at the next operator
        thread.backward = schedule.arrivals.empty()
                              ? never_backward
                              : std::min(at, -schedule.arrivals.begin()->first.first);
    }
    if (phase != Phase::backward) {
        thread.forward = schedule.ends.empty() ? never_forward : schedule.ends.begin()->first.first;
    }
    return is_done;
}

// The mover of a timing, kept alive; null: it is being destroyed.
Ref<Mover> mover_at(std::size_t at) {
    Mover *mover = timings()[at]->mover;
    return Ref<Mover>::share(mover->policy == nullptr ? nullptr : mover);
}

} // namespace

bool timing_saved(Mover *mover, Group *group, Departure *departure, Arrival *arrival) {
    if (mover->timing == nullptr) {
        mover->timing = new Timing{.mover = mover, .threads = {}};
        timings().push_back(mover->timing);
    }
    clock_start();
    std::uint64_t number = clock_thread();
    SWAPKIT_ASSERT(number != plan_clock);
    timing_forget(group);
    Thread &thread = thread_of(*mover->timing, number);
    group->operation = static_cast<std::int64_t>(at::sequence_number::peek()) - 1;
    group->thread = number;
    thread.saved[group->serial] = group;
    std::int64_t due = release_at(group);
    departure->release = ReleaseAt::pressure;
    departure->has_end = true;
    departure->end = {.clock = number, .number = due, .order = group->serial};
    *arrival = used_by(number);
    if (due < thread.forward) {
        thread.forward = due;
        set_alarms(number);
    }
    int traced = is_traced(mover);
    return traced == 0 ||
           (traced == 1 && call_method<"note_planned">(mover->policy, as_object(group)));
}

bool timing_note(const Mover *mover, std::uint64_t clock, PyObject *kind, Group *group,
                 std::int64_t number) {
    int traced = clock == plan_clock ? 0 : is_traced(mover);
    if (traced != 1) {
        return traced == 0;
    }
    return static_cast<bool>(call_method<"note_move">(mover->policy, kind, group, number));
}

void timing_forget(Group *group) {
    std::uint64_t number = std::exchange(group->thread, 0);
    if (number != 0 && group->mover->timing != nullptr) {
        group->mover->timing->threads.at(number).saved.erase(group->serial);
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
            mover->timing != nullptr) { // it may have ended while this thread waited for the lock
            auto found = mover->timing->threads.find(thread);
            is_done = found == mover->timing->threads.end() ||
                      ring(*mover->timing, thread, found->second, number, phase);
        }
    }
    set_alarms(thread);
    return is_done;
}

Ref<> timing_counts(const Mover *mover) {
    static const std::map<std::uint64_t, Thread> none;
    return list_of(mover->timing == nullptr ? none : mover->timing->threads, [&](const auto &each) {
        const auto &[number, thread] = each;
        std::size_t ends = mover->books->agenda.schedule(number).ends.size();
        return Ref<>::steal(
            Py_BuildValue("(nnn)", thread.saved.size(), ends, thread.orders.size()));
    });
}

} // namespace swapkit
