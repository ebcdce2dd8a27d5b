// copying.cpp - written storages are copied out while they stay, so that leaving takes no time.
#include "held/table.hpp"

#include <algorithm>

namespace swapkit {

namespace {

// So many written storages are copied out at once while they stay.
constexpr std::size_t most_copying = 4;

// Return a storage that was written, and that may be copied now; null: there is none.
Held *take_written(HeldOrder &order) {
    std::lock_guard guard(held_lock);
    while (!order.written.empty()) {
        Held *held = order.written.front();
        if (held->pins != 0) {
            return nullptr;
        }
        order.written.pop_front();
        if (held->is_here && held->is_written && held->is_sealed) {
            return held;
        }
    }
    return nullptr;
}

} // namespace

int copy_while_here(Mover *mover, Held *held) {
    Streams streams;
    bool is_written = false;
    {
        std::lock_guard guard(held_lock);
        if (!held->is_here || held->pins != 0 || !held->is_sealed) {
            return 0;
        }
        is_written = std::exchange(held->is_written, false); // an operator may write meanwhile
        streams = held->streams;
    }
    int is_copied = start_out(mover, held, streams, is_written);
    if (is_copied != 1) {
        std::lock_guard guard(held_lock);
        held->is_written = held->is_written || is_written;
    }
    return is_copied;
}

// In the order of writing: those that backward or an optimizer writes first are used last.
bool copy_behind(Mover *mover) {
    HeldOrder &order = mover->books->held;
    while (order.plan.empty() && order.behind_bytes != 0 && mover->host_is_full == 0) {
        if (order.copying.size() == most_copying) {
            int is_done = poll_out(mover, order.copying.front()->group);
            if (is_done != 1) {
                return is_done == 0;
            }
            order.copying.pop_front();
        }
        Held *held = take_written(order);
        int is_copied = held == nullptr ? 0 : copy_while_here(mover, held);
        if (is_copied != 1) {
            return is_copied == 0;
        }
        order.copying.push_back(held);
        order.behind_bytes -= std::min(order.behind_bytes, held->group->nbytes);
    }
    return true;
}

} // namespace swapkit
