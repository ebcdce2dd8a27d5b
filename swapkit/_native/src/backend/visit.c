/* visit.c - see visit.h. */
#include "backend/visit.h"

/* The backend whose device stays current on this thread, from its first call until its visit ends.
 * Calls to another device in the meantime are outside the visit: each makes its own current. */
static _Thread_local struct {
    const void *self; /* NULL: none */
    unsigned depth;
    bool entered;
    void *undo;
} visit;

void sk__visit_begin_with(const void *self) {
    if (visit.self == NULL) {
        visit.self = self;
    }
    visit.depth += visit.self == self;
}

int sk__visit_enter(const sk__visitor *visitor, const void *self, void **undo) {
    *undo = NULL;
    if (visitor->gone() != NULL) {
        return visitor->gone_result;
    }
    if (visit.self == self && visit.entered) {
        return 0;
    }
    int result = visitor->enter(self, undo);
    if (visit.self == self && result == 0) {
        visit.entered = true;
        visit.undo = *undo;
        *undo = NULL;
    }
    return result;
}

void sk__visit_undo(const sk__visitor *visitor, const void *self, void *undo) {
    if (undo != NULL) {
        visitor->leave(self, undo);
    }
}

sk_status sk__visit_leave(const sk__visitor *visitor, const void *self, void *undo,
                          const char *what, int result) {
    /* First: a library may be asked for the message of its latest error. */
    sk_status status = visitor->status(self, what, result);
    sk__visit_undo(visitor, self, undo);
    return status;
}

static bool is_lasting(const sk__visitor *visitor, int result) {
    return result == visitor->gone_result || visitor->is_sticky(result);
}

sk_status sk__visit_leave_released(const sk__visitor *visitor, const void *self, void *undo,
                                   const char *what, int result) {
    sk_status status = sk__visit_leave(visitor, self, undo, what, result);
    return is_lasting(visitor, result) ? SK_OK : status;
}

sk_status sk__visit_leave_locking(const sk__visitor *visitor, const void *self, void *undo,
                                  const char *what, int result) {
    sk_status status = sk__visit_leave(visitor, self, undo, what, result);
    return status == SK_OK || is_lasting(visitor, result) ? status : SK_OUT_OF_HOST_MEMORY;
}

void sk__visit_end_with(const sk__visitor *visitor, const void *self) {
    if (visit.self != self || --visit.depth > 0) {
        return;
    }
    void *undo = visitor->gone() == NULL ? visit.undo : NULL;
    visit.self = NULL;
    visit.entered = false;
    visit.undo = NULL;
    sk__visit_undo(visitor, self, undo);
}
