// order.cpp - in which order operators use held storages, and which should leave first.
#include "held/table.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace swapkit {

namespace {

// The order is searched so far for a use that comes out of turn.
constexpr std::size_t out_of_turn = 64;
// Without steps, so many uses in a row are taken for one.
constexpr std::size_t most_uses = 1 << 16;
// Storages that have a smaller part of the bytes needed stay if they can: they would free little,
// and to bring one takes about as long as to copy so many bytes.
constexpr std::size_t few = 16, most_few_bytes = 128 << 10;

constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

// Return in how many uses a storage is used next, after this place in the last step's order;
// `never`: not known.
std::size_t next_use(const HeldOrder &order, const Held *held, std::size_t at) {
    if (held->uses.empty()) {
        return never;
    }
    auto next = std::upper_bound(held->uses.begin(), held->uses.end(), at);
    return (next != held->uses.end() ? *next : held->uses.front() + order.last.size()) - at;
}

// Return after how many uses, at most so many, the farthest of a storage is that is here; 0: none.
std::size_t find_here(const HeldOrder &order, std::size_t at, std::size_t most) {
    std::size_t before_end = order.last.size() - 1 - at; // the uses up to the end of the order
    while (most != 0) {
        bool is_over = most > before_end; // at the beginning again
        std::size_t first = is_over ? 0 : at + 1;
        std::size_t last = is_over ? most - before_end - 1 : at + most;
        const void *found = memrchr(&order.here[first], 1, last - first + 1);
        if (found != nullptr) {
            auto place =
                static_cast<std::size_t>(static_cast<const char *>(found) - &order.here[0]);
            return most - (last - place);
        }
        most = is_over ? before_end : 0;
    }
    return 0;
}

bool is_older(const Held *one, const Held *other) {
    return one->last_use > other->last_use; // the top of a heap is the greatest
}

} // namespace

void begin_order(HeldOrder &order) {
    if (!order.plan.empty()) {
        order.now.clear();
        order.done = order.events_done = 0;
        order.at = order.last.size() - 1;
        return;
    }
    for (Held *each : order.last) {
        each->uses.clear();
    }
    order.last = std::exchange(order.now, {});
    order.here.resize(order.last.size());
    for (std::size_t i = 0; i < order.last.size(); i++) {
        order.last[i]->uses.push_back(i);
        order.here[i] = order.last[i]->is_here ? 1 : 0;
    }
    order.at = order.last.empty() ? 0 : order.last.size() - 1;
    order.idle.clear();
    std::copy_if(order.all.begin(), order.all.end(), std::back_inserter(order.idle),
                 [](const Held *each) { return each->uses.empty(); });
}

void count_use(Held *held) {
    HeldOrder &order = order_of(held);
    held->last_use = ++order.clock;
    note_again(order, held);
    if (!order.now.empty() && order.now.back() == held) {
        return;
    }
    if (order.now.size() == most_uses) {
        begin_order(order);
    }
    order.now.push_back(held);
    std::size_t size = order.last.size();
    for (std::size_t i = 0; i < std::min(size, out_of_turn); i++) {
        std::size_t at = (order.at + i) % size;
        if (order.last[at] == held) {
            order.at = at;
            note_due(order);
            return;
        }
    }
}

// ---- which should leave first -------------------------------------------------------------------

Farthest::Farthest(Mover *mover, std::size_t needed_bytes, std::size_t least, bool all)
    : order_(mover->books->held), few_bytes_(std::min(most_few_bytes, needed_bytes / few)),
      least_(least), all_(all) {
    std::lock_guard guard(held_lock);
    begin();
}

void Farthest::begin() {
    idle_.clear();
    std::copy_if(order_.idle.begin(), order_.idle.end(), std::back_inserter(idle_),
                 [this](const Held *each) { return each->is_here || all_; });
    std::make_heap(idle_.begin(), idle_.end(), is_older);
    at_ = order_.at;
    distance_ = order_.last.size();
}

Held *Farthest::take() {
    if (!idle_.empty()) {
        std::pop_heap(idle_.begin(), idle_.end(), is_older);
        Held *found = idle_.back();
        idle_.pop_back();
        return found;
    }
    const std::size_t size = order_.last.size(); // an operator elsewhere may begin an order
    while (distance_ > least_ && distance_ <= size && at_ < size) {
        std::size_t found = all_ ? distance_ : find_here(order_, at_, distance_);
        distance_ = found == 0 ? 0 : found - 1;
        Held *each = order_.last[(at_ + found) % size];
        if (found > least_ && next_use(order_, each, at_) == found) { // not used before that
            return each;
        }
    }
    return nullptr;
}

Held *Farthest::next() {
    std::lock_guard guard(held_lock);
    for (;;) {
        Held *found = take();
        if (found == nullptr && (is_last_ || !all_)) {
            return nullptr;
        }
        if (found == nullptr) {
            is_last_ = true;
            begin();
        } else if (found->pins == 0 && found->is_sealed && (found->is_here || all_) &&
                   (found->group->nbytes < few_bytes_) == is_last_) {
            return found;
        }
    }
}

} // namespace swapkit
