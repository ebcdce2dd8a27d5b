// planned.cpp - held storages leave and come as a plan decides, at operators' uses.
//
// A plan knows the order of uses in a step. A use that is not as expected moves nothing: then, and
// for what finds no room, operators bring what they need, and a rescue lets others go.
#include "held/table.hpp"

#include "memory/copy_owners.hpp"

#include <algorithm>
#include <utility>

namespace swapkit {

namespace {

template <class All> bool contains(const All &all, const Held *held) {
    return std::find(all.begin(), all.end(), held) != all.end();
}

} // namespace

void forget_plan(HeldOrder &order) {
    order.plan.clear();
    order.leaving.clear();
    order.going.clear();
    order.coming.clear();
    order.awaited.clear();
    order.following.clear();
    order.events.clear();
    order.lingering = nullptr;
}

void note_again(HeldOrder &order, const Held *held) {
    if (order.lingering != nullptr && (order.lingering != held || --order.lingers == 0)) {
        order.leaving.push_back(std::exchange(order.lingering, nullptr));
    }
}

void note_due(HeldOrder &order) {
    for (; order.done < order.plan.size() && order.done <= order.at; order.done++) {
        const HeldMoves &moves = order.plan[order.done];
        order.coming.insert(order.coming.end(), moves.comes.begin(), moves.comes.end());
        order.awaited.insert(order.awaited.end(), moves.gone.begin(), moves.gone.end());
        order.following.insert(order.following.end(), moves.follows.begin(), moves.follows.end());
        if (moves.leaves > 1 && order.done == order.at) {
            order.lingering = order.last[order.done];
            order.lingers = moves.leaves - 1;
        } else if (moves.leaves != 0) {
            order.leaving.push_back(order.last[order.done]);
        }
    }
}

void note_left(HeldOrder &order) {
    for (Held *each : order.plan.empty() ? std::vector<Held *>() : order.all) {
        const std::vector<Held *> &first = order.plan.front().comes;
        if (each->is_here && !each->uses.empty() && order.plan[each->uses.back()].leaves != 0 &&
            !contains(order.leaving, each) && !contains(first, each)) {
            order.leaving.push_back(each);
        }
    }
}

Held *take_going(HeldOrder &order) {
    std::lock_guard guard(held_lock);
    while (!order.going.empty()) {
        auto [first, last_use] = order.going.front();
        order.going.pop_front();
        if (first->last_use == last_use) {
            return first;
        }
    }
    return nullptr;
}

bool is_due(const HeldOrder &order, const Held *running) {
    return !order.coming.empty() || !order.going.empty() || !order.awaited.empty() ||
           std::any_of(order.leaving.begin(), order.leaving.end(),
                       [running](const Held *each) { return each != running; });
}

namespace {

// Let those go whose copies are whole, in the order in which they left.
bool give_up_copied(Mover *mover) {
    HeldOrder &order = mover->books->held;
    for (;;) {
        Held *each = take_going(order);
        int is_gone = each == nullptr ? 1 : let_go_now(mover, each);
        if (each == nullptr || is_gone < 0) {
            return is_gone == 1;
        }
        // Otherwise gone, or used again meanwhile.
        if (is_gone == 0 && is_here(each) && group_state(each->group) == SK_GROUP_COPYING_OUT) {
            std::lock_guard guard(held_lock);
            order.going.emplace_front(each, each->last_use);
            return true;
        }
    }
}

} // namespace

bool leave_planned(Mover *mover) {
    HeldOrder &order = mover->books->held;
    std::vector<Held *> leaving, awaited;
    {
        std::lock_guard guard(held_lock);
        awaited = std::exchange(order.awaited, {});
        for (Held *each : std::exchange(order.leaving, {})) {
            (each->pins != 0 ? order.leaving : leaving).push_back(each);
        }
    }
    for (Held *each : leaving) {
        int is_going = copy_while_here(mover, each);
        // What has a copy does not wait behind the copies of others.
        int is_gone = is_going == 1 ? let_go_now(mover, each) : is_going;
        if (is_gone < 0) {
            return false;
        }
        if (is_going == 1 && is_gone == 0) {
            std::lock_guard guard(held_lock);
            order.going.emplace_back(each, each->last_use);
        }
    }
    for (Held *each : awaited) {
        if (let_go(mover, each) < 0) {
            return false;
        }
    }
    return give_up_copied(mover);
}

bool come_planned(Mover *mover) {
    std::vector<Held *> coming;
    HeldOrder &order = mover->books->held;
    {
        std::lock_guard guard(held_lock);
        coming = std::exchange(order.coming, {});
        coming.insert(coming.end(), order.following.begin(), order.following.end());
        order.following.clear();
    }
    auto next = coming.begin();
    for (; next != coming.end(); ++next) {
        if (is_here(*next) || group_state((*next)->group) != SK_GROUP_OUT) {
            continue;
        }
        int started = has_room(mover, (*next)->group->nbytes, false);
        if (started < 0 || (started == 1 && !start_held(mover, *next, true, &started))) {
            return false;
        }
        if (started == 0) {
            break; // at a later use
        }
    }
    std::lock_guard guard(held_lock);
    order.coming.insert(order.coming.begin(), next, coming.end());
    return true;
}

bool held_comes(const HeldOrder &order, std::int64_t event) {
    return order.events_done < order.events.size() &&
           order.events[order.events_done].first <= event;
}

bool held_bring(Mover *mover, std::int64_t event) {
    HeldOrder &order = mover->books->held;
    {
        std::lock_guard guard(held_lock);
        for (; held_comes(order, event); order.events_done++) {
            order.coming.push_back(order.events[order.events_done].second);
        }
    }
    return come_planned(mover);
}

namespace {

// Read the address of a storage that the mover holds. Null: an exception is set.
Held *read_held(const Mover *mover, PyObject *address) {
    unsigned long long read = PyLong_AsUnsignedLongLong(address);
    std::lock_guard guard(held_lock);
    Held *held = find_held(reinterpret_cast<const c10::StorageImpl *>(read));
    if (PyErr_Occurred() == nullptr && (held == nullptr || held->group->mover != mover)) {
        PyErr_SetString(PyExc_KeyError, "swapkit: a plan is about a weight that does not leave");
    }
    return PyErr_Occurred() == nullptr ? held : nullptr;
}

bool read_all(const Mover *mover, PyObject *addresses, std::vector<Held *> *read) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(addresses); i++) {
        read->push_back(read_held(mover, PyList_GET_ITEM(addresses, i)));
        if (read->back() == nullptr) {
            return false;
        }
    }
    return true;
}

bool read_use(const Mover *mover, PyObject *row, std::vector<Held *> *uses,
              std::vector<HeldMoves> *plan) {
    PyObject *address = nullptr, *comes = nullptr, *gone = nullptr, *follows = nullptr;
    unsigned leaves = 0;
    if (PyArg_ParseTuple(row, "OIO!O!O!", &address, &leaves, &PyList_Type, &comes, &PyList_Type,
                         &gone, &PyList_Type, &follows) == 0) {
        return false;
    }
    HeldMoves moves = {.leaves = leaves, .comes = {}, .gone = {}, .follows = {}};
    if (!read_all(mover, comes, &moves.comes) || !read_all(mover, gone, &moves.gone) ||
        !read_all(mover, follows, &moves.follows)) {
        return false;
    }
    uses->push_back(read_held(mover, address));
    plan->push_back(std::move(moves));
    return uses->back() != nullptr;
}

bool read_event(const Mover *mover, PyObject *row,
                std::vector<std::pair<std::int64_t, Held *>> *events) {
    PyObject *address = nullptr;
    long long event = 0;
    if (PyArg_ParseTuple(row, "LO", &event, &address) == 0) {
        return false;
    }
    events->emplace_back(event, read_held(mover, address));
    return events->back().second != nullptr;
}

} // namespace

bool held_plan(Mover *mover, PyObject *uses, PyObject *events) {
    std::vector<Held *> order;
    std::vector<HeldMoves> plan;
    std::vector<std::pair<std::int64_t, Held *>> at_events;
    for (Py_ssize_t i = 0; PyList_Check(uses) && i < PyList_GET_SIZE(uses); i++) {
        if (!read_use(mover, PyList_GET_ITEM(uses, i), &order, &plan)) {
            return false;
        }
    }
    for (Py_ssize_t i = 0; PyList_Check(events) && i < PyList_GET_SIZE(events); i++) {
        if (!read_event(mover, PyList_GET_ITEM(events, i), &at_events)) {
            return false;
        }
    }
    std::lock_guard guard(held_lock);
    HeldOrder &held = mover->books->held;
    forget_plan(held);
    if (!plan.empty()) {
        held.now = std::move(order);
        begin_order(held); // as if the step before had used them in that order
        held.plan = std::move(plan);
        held.events = std::move(at_events);
        begin_order(held);
    }
    return true;
}

// ---- for recordings and reports -----------------------------------------------------------------

Ref<> held_memory(Mover *mover) {
    auto addresses = Ref<>::steal(PyList_New(0));
    unsigned long long away = 0;
    for (const Held *each : mover->books->held.all) {
        const c10::StorageImpl *storage =
            each->group->storage; // one that is coming has another one
        if (storage == nullptr) {
            away += each->group->nbytes;
            continue;
        }
        auto address = for_python(memory_of(storage));
        if (!addresses || !address || PyList_Append(addresses.get(), address.get()) != 0) {
            return {};
        }
    }
    return Ref<>::steal(addresses ? Py_BuildValue("(KO)", away, addresses.get()) : nullptr);
}

Ref<> held_bytes(Mover *mover) {
    unsigned long long all = 0, here = 0, kept = 0, in_regions = 0;
    for (const Held *each : mover->books->held.all) {
        std::lock_guard guard(held_lock);
        if (!each->is_sealed && !each->is_kept) {
            continue;
        }
        all += each->group->nbytes;
        in_regions += each->regions != 0 ? each->group->nbytes : 0;
        if (each->is_here) {
            here += each->group->nbytes;
            kept += each->is_kept ? each->group->nbytes : 0;
        }
    }
    return Ref<>::steal(Py_BuildValue("(KKKKK)", all, here, kept, in_regions,
                                      static_cast<unsigned long long>(mover->books->held.late)));
}

} // namespace swapkit
