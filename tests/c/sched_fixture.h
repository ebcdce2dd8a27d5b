/* sched_fixture.h - a scheduler over a backend, and storages with their groups.
 *
 * Device memory is a *slab*: counted references, so that an owner dropped twice or a copy into
 * memory that was dropped is seen by the address sanitiser, and one never dropped by scene_close().
 */
#ifndef SWAPKIT_TESTS_SCHED_FIXTURE_H
#define SWAPKIT_TESTS_SCHED_FIXTURE_H

#include "disk_fixture.h"
#include "sched/sched.h"
#include "swapkit_sched.h"

typedef struct scene {
    sk_backend *backend;
    sk_backend *gate;  /* the delay wrapper inside `backend`, or NULL */
    sk_backend *fault; /* the fault wrapper inside `backend`, or NULL */
    sk_sched *sched;
    char folder[FOLDER_CHARS]; /* of the disk; empty: none */
    atomic_int nslabs;         /* alive */
    atomic_int ndrops;         /* owners, ever */
} scene;

typedef struct scene_options {
    size_t host_limit_bytes, disk_limit_bytes;
    uint32_t copies_in_flight;
    uint64_t host_nodes;
    bool disk, gate, fault;
    bool streams; /* even the NULL stream is none of the host's: as on a device with streams */
} scene_options;

/* `*s` must stay where it is: owners point to it. */
void scene_open(scene *s, const scene_options *options);
void scene_open_over(scene *s, sk_backend *device, const scene_options *options);
/* No group may be left. Checks that nothing else is, and destroys everything. */
void scene_close(scene *s);
void scene_check(scene *s); /* every invariant, and the limits */
sk_sched_stats scene_stats(scene *s);

typedef struct slab {
    scene *scene;
    atomic_int nholders;
    atomic_int dropped_as; /* 1: the first owner that this scene dropped; 0: not yet */
    size_t nbytes;
    void *bytes;
} slab;

slab *slab_make(scene *s, size_t nbytes);
void slab_drop(slab *slab);

/* A storage: its device memory while it has some, and its group. */
typedef struct parcel {
    scene *scene;
    sk_group *group;
    slab *device;
    size_t nbytes;
    unsigned seed;
    uint64_t next_use;
} parcel;

parcel parcel_make(scene *s, size_t nbytes, sk_tier tier, uint64_t next_use);
void parcel_drop(parcel *p);
/* The moves; those that return a status may fail, the others are checked. */
sk_status parcel_out(parcel *p, sk_stream *producer);
void parcel_finish_out(parcel *p);
void parcel_evict(parcel *p);
sk_status parcel_in(parcel *p, sk_stream *producer);
void parcel_finish_in(parcel *p); /* its bytes are checked, too */
bool parcel_holds(const parcel *p);
void parcel_send(parcel *p);  /* out, finished, evicted */
void parcel_fetch(parcel *p); /* in, finished, checked */
sk_group_state parcel_state(const parcel *p);
sk__place parcel_place(const parcel *p); /* where its copy is at this moment */
/* Whatever state it is in: bring its bytes to the device, nothing failing any more. */
void parcel_recover(parcel *p);

#endif
