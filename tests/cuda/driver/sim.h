/* sim.h - the inside of the simulated driver.
 *
 *   window     addresses that device memory is given out from; never accessible
 *   shadow     the same number of bytes at a fixed distance, where the bytes of device memory lie
 *   span       a piece of the window in use: a chunk, or a reservation
 *   chunk      a span that plain allocations are carved from
 *   task       one thing that a stream does; a stream is a queue of tasks and the thread that does
 *              them in order
 *   recording  one cuEventRecord(): done when the stream got there
 *   point      a place in a stream's queue
 *
 * One lock guards everything. sim_enter() takes it and sim_leave() gives it back; what lies between
 * is said to be "inside". Workers give it up while they move bytes, sleep or call; whoever waits
 * gives it up while waiting.
 */
#ifndef CUSIM_SIM_H
#define CUSIM_SIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include "cuda_abi.h"
#include "cusim.h"

/* table.c: objects that begin with a range, sorted by address and never overlapping. */
typedef struct sim_range {
    uintptr_t base;
    size_t size;
} sim_range;

typedef struct sim_table {
    sim_range **items;
    size_t count, capacity;
} sim_table;

/* Index of the first range that ends above `address`. */
size_t sim_table_first(const sim_table *table, uintptr_t address);
/* The range that contains `address`, or NULL. */
void *sim_table_find(const sim_table *table, uintptr_t address);
/* The range that begins at `address`, or NULL. */
void *sim_table_at(const sim_table *table, uintptr_t address);
bool sim_table_overlaps(const sim_table *table, uintptr_t base, size_t size);
/* False: no host memory. */
bool sim_table_insert(sim_table *table, sim_range *range);
void sim_table_remove(sim_table *table, const sim_range *range);
size_t sim_table_bytes(const sim_table *table);
bool sim_range_contains(const sim_range *range, uintptr_t base, size_t size);
bool sim_range_overlaps(const sim_range *range, uintptr_t base, size_t size);

/* handle.c: handles are numbers that no pointer can have, and are not given out twice. */
typedef enum sim_kind {
    SIM_KIND_CONTEXT = 1,
    SIM_KIND_STREAM,
    SIM_KIND_EVENT,
    SIM_KIND_PHYSICAL,
} sim_kind;

uint64_t sim_handle_open(sim_kind kind, void *object); /* 0: no host memory */
void *sim_handle_get(sim_kind kind, uint64_t handle);  /* NULL: never given out, or closed */
void sim_handle_close(uint64_t handle);
size_t sim_handle_count(sim_kind kind);

typedef struct sim_stream sim_stream;
typedef struct sim_event sim_event;
typedef struct sim_task sim_task;

typedef struct sim_context {
    uint64_t handle;
    int device;
    unsigned retained; /* active while above 0 */
    CUresult sticky;
    bool peers[CUSIM_MAX_DEVICES];
    sim_stream *streams; /* also those that are destroyed and still work */
    sim_stream *legacy;  /* the default stream; made when it is first used */
    sim_event *events;
} sim_context;

typedef enum sim_direction { SIM_H2D, SIM_D2H, SIM_D2D, SIM_DIRECTIONS } sim_direction;

typedef struct sim_device {
    sim_context primary;
    size_t used;    /* bytes of the capacity */
    int file;       /* bytes of cuMemCreate, so that they can be mapped anywhere */
    off_t file_end; /* file offsets are not used twice */
    uint64_t link_free_ns[SIM_DIRECTIONS]; /* when the link will have moved all it was given */
    uint64_t compute_free_ns;              /* virtual GPU: when all kernels will be done */
} sim_device;

typedef struct sim_state {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a task or a worker is done, or something that stops work changed */
    unsigned waiters;       /* for `changed` */
    atomic_bool initialised, exiting, forked;
    atomic_size_t exit_calls;
    atomic_int log; /* options.log, to be read at any time */
    bool configured;
    cusim_options options;
    uint64_t epoch; /* cuInit() count: context stacks of an earlier one are void */
    bool hold;
    size_t workers;
    size_t problems;
    char problem[256];
    sim_device devices[CUSIM_MAX_DEVICES];
    uintptr_t window, cursor; /* cursor: where the search for a free span begins */
    size_t window_size;
    sim_table spans, allocations, reservations, mappings, pinned;
    size_t physical_count, physical_bytes;
} sim_state;

extern sim_state sim;

/* context.c */
sim_context *sim_context_current(void); /* NULL: none */
void sim_context_init(int device);
/* The context of a handle, or NULL. Inactive ones are included. */
sim_context *sim_context_get(CUcontext handle);

/* space.c: the window and who has what of it. */
bool sim_space_open(void);
void sim_space_close(void);
/* Find `size` free bytes; 0 if there are none. The caller inserts the span. */
uintptr_t sim_space_find(size_t size, size_t alignment);
bool sim_in_window(uintptr_t base, size_t size); /* whether any byte lies in window or shadow */
void *sim_shadow_of(uintptr_t address);
/* Give a span of the window bytes of its own, or those of a file. */
bool sim_space_commit(uintptr_t base, size_t size, int file, off_t offset);
void sim_space_decommit(uintptr_t base, size_t size);
/* Let AddressSanitizer report whoever touches these bytes, or no longer. Otherwise nothing. */
void sim_poison(void *bytes, size_t size);
void sim_unpoison(void *bytes, size_t size);
/* Why `device` must not use these bytes; NULL if it may. A copy may use plain memory of any device,
 * a kernel needs peer access for that. */
const char *sim_access_problem(const sim_range *range, int device, bool write, bool copy);

/* memory.c */
typedef struct sim_chunk {
    sim_range range;
    sim_context *context;
    struct sim_chunk *next;
    size_t live;      /* allocations */
    uintptr_t cursor; /* where the search for a free piece begins */
} sim_chunk;

typedef struct sim_allocation {
    sim_range range; /* as asked for */
    sim_context *context;
    sim_chunk *chunk;
    size_t charged; /* of the capacity */
    uint64_t id;
} sim_allocation;

/* Inside; may leave the lock. Free what the context still has. */
void sim_memory_close(const sim_context *context);
/* Take bytes of a device's capacity; false if there are not as many. */
bool sim_charge(int device, size_t bytes);

/* vmm.c */
typedef struct sim_physical {
    uint64_t handle;
    int device;
    size_t size;
    off_t offset;
    unsigned references; /* of the handle; 0: it is closed */
    unsigned mapped;
} sim_physical;

typedef struct sim_mapping {
    sim_range range;
    sim_physical *physical;
    unsigned char access[CUSIM_MAX_DEVICES]; /* CU_MEM_ACCESS_FLAGS_PROT_... */
} sim_mapping;

/* host.c */
typedef struct sim_pinned {
    sim_range range;
    bool registered; /* else allocated here */
    sim_context *context;
    size_t mapped; /* with guard pages, if allocated here */
} sim_pinned;

/* Whether a host range is pinned. False in `*legal`: it is partly so, which the driver refuses. */
bool sim_host_pinned(const sim_range *range, bool *legal);
bool sim_host_mapped(uintptr_t base, size_t size); /* whether the process has all these pages */
void sim_host_close(const sim_context *context);
void sim_host_zero(const sim_range *range); /* with as few pages as possible */

/* stream.c */
typedef struct sim_recording {
    unsigned references;
    bool done;
    uint64_t time_ns;
} sim_recording;

typedef struct sim_point {
    sim_stream *stream; /* one reference */
    uint64_t sequence;
} sim_point;

typedef struct sim_points {
    size_t count;
    sim_point items[];
} sim_points;

typedef enum sim_task_kind {
    SIM_TASK_COPY,
    SIM_TASK_FILL,
    SIM_TASK_KERNEL,
    SIM_TASK_CALL,
    SIM_TASK_SLEEP,
    SIM_TASK_RECORD,
    SIM_TASK_WAIT,
} sim_task_kind;

struct sim_task {
    sim_task *next;
    uint64_t sequence;
    sim_points *after; /* or NULL: what has to be done before, beside the stream's own queue */
    sim_task_kind kind;
    bool running;    /* its bytes are being used */
    uint64_t due_ns; /* virtual GPU: when a call is to be made */
    union {
        struct {
            void *to;
            const void *from;
            void *staging; /* or NULL: host memory to free */
            size_t size;
            sim_direction direction;
            bool pageable; /* the host's side is not pinned */
        } copy;
        struct {
            void *to;
            size_t size;
            unsigned char value;
        } fill;
        struct {
            cusim_kernel *kernel;
            void *arg;
        } kernel;
        struct {
            CUhostFn fn;
            void *data;
        } call;
        uint64_t sleep_ns;
        sim_recording *recording; /* one reference */
    } as;
    size_t use_count;
    sim_range uses[]; /* of device memory and pinned host memory */
};

struct sim_stream {
    uint64_t handle; /* 0: destroyed, or a default stream */
    sim_context *context;
    sim_stream *next;    /* in the context */
    unsigned references; /* its context's list, points */
    bool blocking, legacy, closing, capturing;
    pthread_cond_t work;
    sim_task *head, *tail; /* head is the one being done */
    uint64_t queued, done; /* sequence numbers */
    uint64_t ready_ns;     /* virtual GPU: when all that was queued will be done */
};

struct sim_event {
    uint64_t handle;
    sim_context *context;
    sim_event *previous, *next; /* in the context */
    unsigned flags;
    sim_recording *recording; /* the latest, or NULL */
};

/* The stream of a handle, if its context has no sticky error. NULL and CU_STREAM_LEGACY mean the
 * default stream of `context`. */
CUresult sim_stream_get(sim_context *context, CUstream handle, sim_stream **out);
sim_task *sim_task_new(sim_task_kind kind, size_t use_count); /* NULL: no host memory */
/* Queue the task, after all that the default stream's rules say. Takes it. */
void sim_task_queue(sim_stream *stream, sim_task *task);
void sim_task_free(sim_task *task);
/* Wait until the stream has done what is queued now; returns its context's sticky error. */
CUresult sim_stream_wait(sim_stream *stream);
void sim_stream_drop(sim_stream *stream);
bool sim_point_done(const sim_point *point);
void sim_context_wait(const sim_context *context);
void sim_streams_close(sim_context *context);
void sim_events_close(sim_context *context);
/* Work that is queued or running in any stream must not use these bytes any more: if some does, it
 * is a problem of its context. Returns when no running task uses them. */
void sim_uses_end(uintptr_t base, size_t size, const char *what);
sim_recording *sim_recording_new(void);
void sim_recording_drop(sim_recording *recording);

/* worker.c */
bool sim_worker_start(sim_stream *stream);

#include "calls.h"
#include "virtual.h"

#endif
