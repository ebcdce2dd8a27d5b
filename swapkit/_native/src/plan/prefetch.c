/* prefetch.c - when copies in may start: as early as possible without slowing computing.
 *
 * A flow with copies in at the last moment, and in no time, gives the bytes that each slot has in
 * use when it begins. In the order of their needs, items then take the rest of the budget, from the
 * slot of their need backwards. Counted in slots, real copies in can only end copies out earlier,
 * since computing waits for them. So no slot has to wait for the memory of a copy in, and nothing
 * can get stuck. */
#include "plan/plan.h"

static int32_t first_with_room(const sk__plan *plan, int32_t least, int32_t need, int64_t nbytes) {
    int64_t most = plan->machine->budget_bytes - nbytes;
    int32_t slot = need;
    while (slot > least && plan->level[slot - 1] <= most) {
        slot--;
        plan->level[slot] += nbytes;
    }
    return slot;
}

static inline int32_t later(int32_t a, int32_t b) { return a > b ? a : b; }

void sk__plan_choose_prefetches(sk__plan *plan) {
    int32_t previous = 0; /* copies in start in order */
    for (int32_t place = 0; place < plan->nins; place++) {
        int32_t item = plan->ins[place];
        int32_t need = plan->run->needs[item];
        int32_t window = plan->request->window;
        int32_t earliest = need > window ? need - window : 0;
        int32_t least = later(later(plan->gone[item], previous), earliest);
        int32_t first = first_with_room(plan, least, need, plan->problem->item_bytes[item]);
        /* There may already be room during the slot before. */
        plan->prefetch[item] = later(first - 1, earliest);
        previous = first;
    }
}
