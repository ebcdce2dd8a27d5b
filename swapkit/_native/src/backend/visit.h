/* visit.h - a device is current on a thread for a call, or for several calls in a row.
 *
 * Every operation of a backend whose library has a current device per thread is a visit: enter,
 * call the library if that worked, leave. Between sk__visit_begin() and sk__visit_end() the device
 * stays current, and only the first call asks. Threads: any; holds no lock. */
#ifndef SWAPKIT_BACKEND_VISIT_H
#define SWAPKIT_BACKEND_VISIT_H

#include "base/base.h"

/* What one kind of device does. Results are those of its library; 0 is success. */
typedef struct sk__visitor {
    const char *(*gone)(void); /* not NULL: the library cannot be called */
    int gone_result;           /* of entering then */
    /* Make the device current. *undo: what `leave` needs, NULL: nothing has to be undone. */
    int (*enter)(const void *self, void **undo);
    void (*leave)(const void *self, void *undo);
    /* Return the result of the library's function `what` as a status with a text. */
    sk_status (*status)(const void *self, const char *what, int result);
    /* Whether the result is sticky: what the process has on the device is lost. */
    bool (*is_sticky)(int result);
} sk__visitor;

void sk__visit_begin_with(const void *self);
void sk__visit_end_with(const sk__visitor *visitor, const void *self);
/* Enter; sk__visit_undo() takes `undo` also if that failed. */
int sk__visit_enter(const sk__visitor *visitor, const void *self, void **undo);
void sk__visit_undo(const sk__visitor *visitor, const void *self, void *undo);

/* Leave with the result of the library's function `what`; return its status. */
sk_status sk__visit_leave(const sk__visitor *visitor, const void *self, void *undo,
                          const char *what, int result);
/* The same for releases: an object that went with the process or the device counts as released. */
sk_status sk__visit_leave_released(const sk__visitor *visitor, const void *self, void *undo,
                                   const char *what, int result);
/* The same for locking host memory: the system's limits come under any error name. */
sk_status sk__visit_leave_locking(const sk__visitor *visitor, const void *self, void *undo,
                                  const char *what, int result);

/* A function's body: one visit, left by one of the functions above. `call` is an expression that
 * may set `what`; `then` is what to do after success. */
#define SK__VISIT(visitor, self, leave, what, call, then)                                          \
    do {                                                                                           \
        void *undo_ = NULL;                                                                        \
        int result_ = sk__visit_enter((visitor), (self), &undo_);                                  \
        if (result_ == 0) {                                                                        \
            result_ = (call);                                                                      \
        }                                                                                          \
        sk_status status_ = (leave)((visitor), (self), undo_, (what), result_);                    \
        if (status_ == SK_OK) {                                                                    \
            then;                                                                                  \
        }                                                                                          \
        return status_;                                                                            \
    } while (0)

#endif
