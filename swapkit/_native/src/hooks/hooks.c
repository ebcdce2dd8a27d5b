/* hooks.c - the operators that are open on each thread.
 *
 * A library of its own, libswapkit.so, so that a process has one copy of this state: the extension
 * that calls the hooks and the runtime that listens load the same file, in any order.
 *
 * The listener may call any function here: no pointer to an operator of the list is kept
 * across a call of the listener, and an operator leaves the list before its end is told. */
#include "swapkit_hooks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    ERROR_TEXT_BYTES = 512,
    NAME_BYTES = 48, /* as many bytes of a name are compared */
    /* An operator whose function's frame is deeper than the caller's by more than this has lost
     * that function. The frames of small functions around the calls are smaller. */
    FRAME_SLACK_BYTES = 1024
};

typedef struct operator_entry {
    struct operator_entry *outer;
    uint64_t token;  /* 0: in the seed's form */
    uintptr_t frame; /* of the call that began it; the stack grows down */
    const void *site;
    const sk_op_listener *listener;
    void *context; /* the listener's; NULL: not followed */
    bool is_posted;
    /* Operators in the seed's form that began inside this one and could not be listed: their calls
     * are not about this one. `missing_frame` is of the first. */
    uint32_t nmissing;
    uintptr_t missing_frame;
    char name[NAME_BYTES];
} operator_entry;

/* Where a hook was called. */
typedef struct place {
    uintptr_t frame;
    const void *site;
} place;

#define HERE()                                                                                     \
    ((place){.frame = (uintptr_t)__builtin_frame_address(0), .site = __builtin_return_address(0)})

static _Atomic(const sk_op_listener *) current_listener;
static _Atomic(uint64_t) tokens; /* so far, of all threads */
static _Atomic(size_t) nunannounced;
/* Each call reads it: without the model each read would be a call, too. With it, all thread-local
 * variables here take memory that the C library sets aside for all libraries, about 1.5 KiB: keep
 * them to two pointers. */
static _Thread_local operator_entry *innermost __attribute__((tls_model("initial-exec")));
static _Thread_local char *error_text; /* allocated, or one of the next; NULL: no failure yet */
static char no_text[] = "no memory for the reason";
static char no_entry[] = "no memory to follow an operator: its kernel runs unannounced";
static pthread_key_t thread_key; /* its value is not NULL on a thread that has begun an operator */
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;
static bool has_thread_key;

/* ---- a thread's operators -------------------------------------------------------------------- */

static bool is_heard(const operator_entry *entry) {
    return entry->context != NULL &&
           entry->listener == atomic_load_explicit(&current_listener, memory_order_acquire);
}

/* Take an operator off the list, and tell the listener. */
static void end_entry(operator_entry *entry) {
    operator_entry **link = &innermost;
    while (*link != entry) {
        link = &(*link)->outer;
    }
    *link = entry->outer;
    if (is_heard(entry)) {
        entry->listener->end(entry->context);
    }
    free(entry);
}

static void set_error_text(char *text) {
    if (error_text != no_text && error_text != no_entry) {
        free(error_text);
    }
    error_text = text;
}

static void end_thread(void *value) {
    (void)value;
    while (innermost != NULL) {
        end_entry(innermost);
    }
    set_error_text(NULL);
}

static void make_thread_key(void) {
    has_thread_key = pthread_key_create(&thread_key, end_thread) == 0;
}

/* See to it that this thread's operators, and the text of its errors, end with it. */
static bool watch_thread(void) {
    if (innermost != NULL) {
        return true;
    }
    (void)pthread_once(&thread_key_once, make_thread_key);
    return has_thread_key && (pthread_getspecific(thread_key) != NULL ||
                              pthread_setspecific(thread_key, &thread_key) == 0);
}

static operator_entry *find(uint64_t token) {
    operator_entry *entry = innermost;
    while (entry != NULL && entry->token != token) {
        entry = entry->outer;
    }
    return entry;
}

/* ---- operators that an exception has left open ----------------------------------------------- */

/* Return whether a call from `here` tells that the function of a frame has been left. */
static bool is_left(uintptr_t frame, place here) {
    return here.frame > frame && here.frame - frame > FRAME_SLACK_BYTES;
}

/* End the innermost operators whose functions have been left. */
static void end_left(place here) {
    while (innermost != NULL && innermost->token == 0 && is_left(innermost->frame, here)) {
        end_entry(innermost);
    }
    operator_entry *entry = find(0);
    if (entry != NULL && is_left(entry->missing_frame, here)) {
        entry->nmissing = 0;
    }
}

/* The same operator, begun at the same place. */
static operator_entry *find_former(const char *name, place here) {
    operator_entry *entry = innermost;
    while (entry != NULL &&
           !(entry->token == 0 && entry->frame == here.frame && entry->site == here.site &&
             strncmp(entry->name, name, NAME_BYTES - 1) == 0)) {
        entry = entry->outer;
    }
    return entry;
}

/* The innermost operator in the seed's form whose frame is no further out than `here`. */
static operator_entry *find_deeper(place here) {
    operator_entry *entry = innermost;
    while (entry != NULL && (entry->token != 0 || entry->frame > here.frame)) {
        entry = entry->outer;
    }
    return entry;
}

/* A function that begins the same operator at the same place again has left the former one, and
 * what was open inside that. */
static void end_repeated(const char *name, place here) {
    while (find_former(name, here) != NULL) {
        end_entry(find_deeper(here)); /* the former one, in the end */
    }
}

/* ---- beginning and ending -------------------------------------------------------------------- */

static const char *name_of(const char *name) {
    return name == NULL || *name == '\0' ? "operator" : name;
}

static const sk_op_listener *find_listener(void) {
    const sk_op_listener *listener = atomic_load_explicit(&current_listener, memory_order_acquire);
    return listener != NULL && listener->is_wanted() ? listener : NULL;
}

/* Without memory for an operator its kernel runs unannounced. */
static void note_unannounced(uint64_t token, place here) {
    (void)atomic_fetch_add_explicit(&nunannounced, 1, memory_order_relaxed);
    set_error_text(no_entry);
    operator_entry *around = token == 0 ? find(0) : NULL;
    if (around != NULL && around->nmissing++ == 0) {
        around->missing_frame = here.frame;
    }
}

/* Put an operator on the list; return its token. 0: in the seed's form, or not on the list. */
static uint64_t begin(const sk_op_listener *listener, const char *name, uint64_t token,
                      place here) {
    operator_entry *entry = watch_thread() ? calloc(1, sizeof *entry) : NULL;
    if (entry == NULL) {
        note_unannounced(token, here);
        return 0;
    }
    *entry = (operator_entry){.token = token,
                              .frame = here.frame,
                              .site = here.site,
                              .listener = listener,
                              .context = listener == NULL ? NULL : listener->begin(name)};
    memcpy(entry->name, name, strnlen(name, NAME_BYTES - 1)); /* the rest is 0 */
    entry->outer = innermost; /* after the call: the listener may have begun operators, too */
    innermost = entry;
    return token;
}

uint64_t sk_op_enter(const char *name) {
    const sk_op_listener *listener = find_listener();
    if (listener == NULL) {
        return 0;
    }
    uint64_t token = atomic_fetch_add_explicit(&tokens, 1, memory_order_relaxed) + 1;
    return begin(listener, name_of(name), token, (place){0});
}

void sk_op_leave(uint64_t token) {
    bool is_done = token == 0 || find(token) == NULL;
    while (!is_done) { /* in the seed's form: what was open inside */
        operator_entry *next = innermost;
        while (next != NULL && next->token != 0 && next->token != token) {
            next = next->outer;
        }
        is_done = next == NULL || next->token == token;
        if (next != NULL) {
            end_entry(next);
        }
    }
}

__attribute__((noinline)) void sk_op_begin(const char *name) {
    const sk_op_listener *listener = find_listener();
    if (listener == NULL && innermost == NULL) {
        return;
    }
    place here = HERE();
    end_left(here);
    end_repeated(name_of(name), here);
    (void)begin(listener, name_of(name), 0, here);
}

/* The operator that a call in the seed's form is about; NULL: none, or one that is not listed. */
static operator_entry *find_called(place here) {
    end_left(here);
    operator_entry *entry = find(0);
    return entry == NULL || entry->nmissing > 0 ? NULL : entry;
}

__attribute__((noinline)) void sk_op_end(void) {
    operator_entry *entry = innermost == NULL ? NULL : find_called(HERE());
    operator_entry *around = find(0);
    if (entry != NULL) {
        end_entry(entry);
    } else if (around != NULL) {
        around->nmissing--;
    }
}

__attribute__((noinline)) void sk_op_post(void) {
    operator_entry *entry = innermost == NULL ? NULL : find_called(HERE());
    if (entry != NULL) {
        entry->is_posted = true;
    }
}

/* ---- operands and outputs -------------------------------------------------------------------- */

static sk_op_result announce(const operator_entry *entry, const sk_op_memory *memory,
                             bool is_output) {
    if (entry == NULL || memory == NULL || !is_heard(entry)) {
        return SK_OP_OK;
    }
    char text[ERROR_TEXT_BYTES];
    text[0] = '\0';
    sk_op_result result =
        entry->listener->memory(entry->context, memory, is_output, text, sizeof text);
    if (result != SK_OP_OK) {
        char *kept = malloc(sizeof text);
        set_error_text(kept == NULL ? no_text : memcpy(kept, text, sizeof text));
    }
    return result;
}

sk_op_result sk_op_operand(uint64_t token, const sk_op_memory *memory) {
    return token == 0 ? SK_OP_OK : announce(find(token), memory, false);
}

sk_op_result sk_op_output(uint64_t token, const sk_op_memory *memory) {
    return token == 0 ? SK_OP_OK : announce(find(token), memory, true);
}

__attribute__((noinline)) sk_op_result sk_op_tensor(const void *address, size_t nbytes,
                                                    void *storage) {
    const operator_entry *entry = innermost == NULL ? NULL : find_called(HERE());
    sk_op_memory memory = {.address = address, .nbytes = nbytes, .storage = storage};
    return announce(entry, &memory, entry != NULL && entry->is_posted);
}

const char *sk_op_error(void) { return error_text == NULL ? "" : error_text; }

/* ---- the runtime's side ---------------------------------------------------------------------- */

void sk_op_connect(const sk_op_listener *listener) {
    atomic_store_explicit(&current_listener, listener, memory_order_release);
}

void sk_op_sweep(void) {
    for (operator_entry *entry = find(0); entry != NULL; entry = find(0)) {
        end_entry(entry);
    }
}

size_t sk_op_unannounced(void) { return atomic_load_explicit(&nunannounced, memory_order_relaxed); }

size_t sk_op_depth(void) {
    size_t depth = 0;
    for (const operator_entry *entry = innermost; entry != NULL; entry = entry->outer) {
        depth++;
    }
    return depth;
}
