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
} sk__visitor;

void sk__visit_begin_with(const void *self);
void sk__visit_end_with(const sk__visitor *visitor, const void *self);
/* Enter; sk__visit_leave() takes `undo` also if that failed. */
int sk__visit_enter(const sk__visitor *visitor, const void *self, void **undo);
void sk__visit_leave(const sk__visitor *visitor, const void *self, void *undo);

#endif
