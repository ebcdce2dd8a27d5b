/* test_disk.c - extents and requests: what is written is read, space is exact and used again.
 *
 * Faults and the system's limits are in test_disk_fault.c.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "disk/handle.h"
#include "disk_fixture.h"

/* ---- round trips ----------------------------------------------------------------------------- */

/* Write and read extents of many sizes from addresses of any alignment. */
static void round_trips(disk_scene *s, uint64_t seed) {
    enum { NEXTENTS = 40, GUARD_BYTES = 64, LARGE = 9 * MIB };
    sk__extent extents[NEXTENTS];
    size_t sizes[NEXTENTS];
    char *memory = take_memory(LARGE + BLOCK + GUARD_BYTES);
    uint64_t state = seed;
    for (unsigned i = 0; i < NEXTENTS; i++) {
        sizes[i] = 1 + random_below(&state, i % 8 == 0 ? LARGE : 20 * BLOCK);
        sizes[i] = i % 5 == 0 ? sk__round_up(sizes[i], BLOCK) : sizes[i];
        sizes[i] = i == 0 ? LARGE : sizes[i];
        extents[i] = disk_reserve(s, sizes[i]);
        char *from = memory + (i % 3 == 0 ? 0 : random_below(&state, BLOCK));
        bytes_write(from, sizes[i], i);
        CHECK_OK(disk_move(s, SK_DISK_WRITE, from, sizes[i], extents[i]));
        CHECK(bytes_hold(from, sizes[i], i));
    }
    for (unsigned i = 0; i < NEXTENTS; i++) {
        char *to = memory + (i % 2 == 0 ? 0 : random_below(&state, BLOCK));
        memset(to, 0, sizes[i]);
        memset(to + sizes[i], 0x5a, GUARD_BYTES);
        CHECK_OK(disk_move(s, SK_DISK_READ, to, sizes[i], extents[i]));
        CHECK(bytes_hold(to, sizes[i], i));
        for (int j = 0; j < GUARD_BYTES; j++) {
            CHECK_EQUAL(0x5a, to[sizes[i] + (size_t)j]);
        }
        sk__disk_release(s->disk, extents[i]);
    }
    CHECK_EQUAL(0, disk_stats(s).in_use_bytes);
    CHECK(disk_stats(s).peak_bytes > 0);
    free(memory);
}

SK_TEST(disk, test_move_when_many_sizes_and_alignments_then_read_as_written) {
    disk_scene s = disk_scene_open(0);
    bool was_direct = disk_stats(&s).is_direct;
    round_trips(&s, 1);
    CHECK_EQUAL(was_direct, disk_stats(&s).is_direct); /* whatever the alignment */
    CHECK(disk_stats(&s).written_bytes > 9 * MIB);
    CHECK_EQUAL(disk_stats(&s).written_bytes, disk_stats(&s).read_bytes);
    disk_scene_close(&s);
}

SK_TEST(disk, test_move_when_no_direct_io_then_read_as_written) {
    fault_calls(SK_DISK_CALL_DIRECT, 1, true, EINVAL);
    disk_scene s = disk_scene_open(0);
    CHECK_EQUAL(1, sk_disk_fault_calls());
    fault_none();
    CHECK(!disk_stats(&s).is_direct);
    round_trips(&s, 2);
    disk_scene_close(&s);
}

SK_TEST(disk, test_move_when_direct_io_is_refused_later_then_goes_on_without) {
    disk_scene s = disk_scene_open(0);
    if (!disk_stats(&s).is_direct) {
        disk_scene_close(&s);
        test_skip("no direct I/O in the folder for temporary files");
    }
    fault_calls(SK_DISK_CALL_WRITE, 3, false, EINVAL);
    round_trips(&s, 3);
    fault_none();
    CHECK(!disk_stats(&s).is_direct);
    disk_scene_close(&s);
}

SK_TEST(disk, test_move_when_part_of_an_extent_then_only_that_is_written) {
    disk_scene s = disk_scene_open(0);
    sk__extent extents[2] = {disk_reserve(&s, 3 * BLOCK), disk_reserve(&s, BLOCK)};
    char *memory = take_memory(4 * BLOCK);
    bytes_write(memory, 4 * BLOCK, 1);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, BLOCK, extents[1]));
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, 3 * BLOCK, extents[0]));
    bytes_write(memory, BLOCK + 7, 2);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, BLOCK + 7, extents[0]));
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, BLOCK + 7, extents[0]));
    CHECK(bytes_hold(memory, BLOCK + 7, 2));
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, BLOCK, extents[1])); /* the neighbour's own */
    CHECK(bytes_hold(memory, BLOCK, 1));
    free(memory);
    disk_scene_close(&s);
}

typedef struct mover {
    disk_scene *scene;
    unsigned number;
} mover;

static void *move_on(void *argument) {
    enum { NROUNDS = 25, NOWN = 4, LARGEST = 6 * MIB };
    const mover *mine = argument;
    uint64_t state = mine->number;
    char *memory[NOWN];
    job jobs[NOWN];
    sk__extent extents[NOWN];
    size_t sizes[NOWN];
    for (int i = 0; i < NOWN; i++) {
        memory[i] = take_memory(LARGEST);
    }
    for (unsigned round = 0; round < NROUNDS; round++) {
        for (unsigned i = 0; i < NOWN; i++) {
            sizes[i] = 1 + random_below(&state, i == 0 ? LARGEST : 64 * KIB);
            extents[i] = disk_reserve(mine->scene, sizes[i]);
            bytes_write(memory[i], sizes[i], mine->number * 7 + round + i);
            job_submit(mine->scene, &jobs[i], SK_DISK_WRITE, memory[i], sizes[i], extents[i]);
        }
        for (unsigned i = 0; i < NOWN; i++) {
            CHECK_OK(job_wait(&jobs[i]));
            memset(memory[i], 0, sizes[i]);
            job_submit(mine->scene, &jobs[i], SK_DISK_READ, memory[i], sizes[i], extents[i]);
        }
        for (unsigned i = 0; i < NOWN; i++) {
            CHECK_OK(job_wait(&jobs[i]));
            CHECK(bytes_hold(memory[i], sizes[i], mine->number * 7 + round + i));
            sk__disk_release(mine->scene->disk, extents[i]);
        }
        CHECK_OK(round % 8 == 0 ? sk__disk_trim(mine->scene->disk) : SK_OK);
        CHECK_OK(sk__disk_check(mine->scene->disk));
    }
    for (int i = 0; i < NOWN; i++) {
        free(memory[i]);
    }
    return NULL;
}

SK_TEST(disk, test_move_when_many_threads_then_each_reads_its_own) {
    enum { NTHREADS = 4 };
    disk_scene s = disk_scene_open(40 * MIB);
    pthread_t threads[NTHREADS];
    mover movers[NTHREADS];
    for (unsigned i = 0; i < NTHREADS; i++) {
        movers[i] = (mover){.scene = &s, .number = i + 1};
        CHECK(pthread_create(&threads[i], NULL, move_on, &movers[i]) == 0);
    }
    for (unsigned i = 0; i < NTHREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    CHECK_EQUAL(0, disk_stats(&s).in_use_bytes);
    disk_scene_close(&s);
}

/* ---- the order of requests ------------------------------------------------------------------- */

/* Each holds a thread of the disk inside done() until it is let go. */
typedef struct gate {
    job job;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_open;
} gate;

static void gate_done(sk__disk_request *request, sk_status status) {
    gate *mine = request->context;
    job_note(&mine->job, status);
    (void)pthread_mutex_lock(&mine->lock);
    while (!mine->is_open) {
        (void)pthread_cond_wait(&mine->changed, &mine->lock);
    }
    (void)pthread_mutex_unlock(&mine->lock);
}

static void gate_open(gate *gate) {
    (void)pthread_mutex_lock(&gate->lock);
    gate->is_open = true;
    (void)pthread_cond_broadcast(&gate->changed);
    (void)pthread_mutex_unlock(&gate->lock);
}

/* Stop every thread of the disk. */
static void gates_close(disk_scene *s, gate *gates, char *memory, sk__extent extent) {
    for (int i = 0; i < SK_DISK_THREADS; i++) {
        gate *mine = &gates[i];
        *mine = (gate){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        mine->job.request = (sk__disk_request){.way = SK_DISK_WRITE,
                                               .memory = memory,
                                               .nbytes = BLOCK,
                                               .extent = extent,
                                               .done = gate_done,
                                               .context = mine};
        CHECK_OK(sk__disk_submit(s->disk, &mine->job.request));
        CHECK_OK(job_wait(&mine->job));
    }
}

typedef struct ordered {
    job job;
    int *counter;
    int place;
} ordered;

static void ordered_done(sk__disk_request *request, sk_status status) {
    ordered *mine = request->context;
    mine->place = (*mine->counter)++; /* by the only thread that runs */
    job_note(&mine->job, status);
}

SK_TEST(disk, test_submit_when_both_directions_wait_then_they_alternate) {
    enum { NWRITES = 3, LARGE = 3 * SK_PIECE_BYTES };
    disk_scene s = disk_scene_open(0);
    char *memory = take_memory(LARGE);
    memset(memory, 1, LARGE);
    sk__extent extent = disk_reserve(&s, LARGE);
    sk__extent other = disk_reserve(&s, BLOCK);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, BLOCK, other));
    gate gates[SK_DISK_THREADS];
    gates_close(&s, gates, memory, other);
    int counter = 0;
    ordered writes[NWRITES + 1]; /* the last is a read */
    for (int i = 0; i <= NWRITES; i++) {
        bool is_read = i == NWRITES;
        writes[i] = (ordered){.counter = &counter};
        writes[i].job.request = (sk__disk_request){.way = is_read ? SK_DISK_READ : SK_DISK_WRITE,
                                                   .memory = memory,
                                                   .nbytes = is_read ? BLOCK : LARGE,
                                                   .extent = is_read ? other : extent,
                                                   .done = ordered_done,
                                                   .context = &writes[i]};
        CHECK_OK(sk__disk_submit(s.disk, &writes[i].job.request));
    }
    CHECK_OK(sk__disk_check(s.disk)); /* with requests queued */
    gate_open(&gates[0]);
    for (int i = 0; i <= NWRITES; i++) {
        CHECK_OK(job_wait(&writes[i].job));
    }
    CHECK_EQUAL(0, writes[NWRITES].place);
    CHECK(writes[0].place < writes[1].place && writes[1].place < writes[2].place);
    for (int i = 1; i < SK_DISK_THREADS; i++) {
        gate_open(&gates[i]);
    }
    disk_scene_close(&s);
    free(memory);
}

SK_TEST(disk, test_submit_when_one_request_is_large_then_every_thread_has_a_piece) {
    enum { LARGE = SK_DISK_THREADS * SK_PIECE_BYTES };
    disk_scene s = disk_scene_open(0);
    char *memory = take_memory(LARGE);
    memset(memory, 1, LARGE);
    sk__extent extent = disk_reserve(&s, LARGE);
    fault_none();
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, LARGE, extent));
    CHECK(sk_disk_fault_calls() >= SK_DISK_THREADS);
    disk_scene_close(&s);
    free(memory);
}

typedef struct chain {
    job job;
    disk_scene *scene;
    sk__extent extent;
} chain;

/* Reads what was just written, then releases it: all from done(). */
static void chain_done(sk__disk_request *request, sk_status status) {
    chain *mine = request->context;
    if (status == SK_OK && request->way == SK_DISK_WRITE) {
        memset(request->memory, 0, request->nbytes);
        request->way = SK_DISK_READ;
        CHECK_OK(sk__disk_submit(mine->scene->disk, request));
        return;
    }
    sk__disk_release(mine->scene->disk, mine->extent);
    job_note(&mine->job, status);
}

static void chain_submit(disk_scene *s, chain *chain, char *memory, size_t nbytes) {
    chain->scene = s;
    chain->extent = disk_reserve(s, nbytes);
    chain->job.request = (sk__disk_request){.way = SK_DISK_WRITE,
                                            .memory = memory,
                                            .nbytes = nbytes,
                                            .extent = chain->extent,
                                            .done = chain_done,
                                            .context = chain};
    CHECK_OK(sk__disk_submit(s->disk, &chain->job.request));
}

SK_TEST(disk, test_done_when_it_submits_and_releases_then_that_works) {
    disk_scene s = disk_scene_open(0);
    char *memory = take_memory(MIB);
    bytes_write(memory, MIB, 9);
    chain mine = {.scene = &s};
    chain_submit(&s, &mine, memory, MIB);
    CHECK_OK(job_wait(&mine.job));
    CHECK(bytes_hold(memory, MIB, 9));
    CHECK_EQUAL(0, disk_stats(&s).in_use_bytes);
    disk_scene_close(&s);
    free(memory);
}

SK_TEST(disk, test_close_when_requests_are_under_way_then_all_are_done_first) {
    enum { NCHAINS = 12, SIZE = 5 * MIB + 3 };
    disk_scene s = disk_scene_open(0);
    chain chains[NCHAINS];
    char *memory[NCHAINS];
    memset(chains, 0, sizeof chains);
    for (unsigned i = 0; i < NCHAINS; i++) {
        memory[i] = take_memory(SIZE);
        bytes_write(memory[i], SIZE, i);
    }
    for (unsigned i = 0; i < NCHAINS; i++) {
        chain_submit(&s, &chains[i], memory[i], SIZE);
    }
    disk_scene_close(&s);
    for (unsigned i = 0; i < NCHAINS; i++) {
        CHECK_EQUAL(1, chains[i].job.ndone);
        CHECK_STATUS(SK_OK, chains[i].job.status);
        CHECK(bytes_hold(memory[i], SIZE, i));
        free(memory[i]);
    }
}

/* ---- space ----------------------------------------------------------------------------------- */

/* Bytes that the file system says the file takes. */
static size_t file_bytes(disk_scene *s) {
    enum { UNIT = 512 };
    struct stat about;
    CHECK(fstat(s->disk->file.fd, &about) == 0);
    return (size_t)about.st_blocks * UNIT;
}

SK_TEST(disk, test_reserve_when_at_the_limit_then_refused_with_the_figures) {
    enum { LIMIT = 8 * BLOCK + 100 };
    disk_scene s = disk_scene_open(LIMIT);
    sk__extent first = disk_reserve(&s, 5 * BLOCK - 1);
    CHECK_EQUAL(5 * BLOCK, first.nbytes);
    sk__extent second = disk_reserve(&s, 3 * BLOCK);
    sk__extent refused = {.offset = 77};
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, 1, &refused));
    CHECK_EQUAL(77, refused.offset);
    CHECK_CONTAINS(sk_error_text(), "no room for 4096 bytes");
    CHECK_CONTAINS(sk_error_text(), "32768 are in use");
    CHECK_CONTAINS(sk_error_text(), "limit is 32868");
    CHECK_CONTAINS(sk_error_text(), s.folder);
    CHECK_EQUAL(8 * BLOCK, disk_stats(&s).backed_bytes);
    CHECK(file_bytes(&s) <= LIMIT);
    sk__disk_release(s.disk, second);
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, 3 * BLOCK + 1, &refused));
    second = disk_reserve(&s, 3 * BLOCK);
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, (size_t)1 << 44, &refused));
    CHECK_EQUAL(8 * BLOCK, disk_stats(&s).peak_bytes);
    disk_scene_close(&s);
    s = disk_scene_open(2 * BLOCK);
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, 2 * BLOCK + 1, &refused));
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_released_space_is_scattered_then_the_limit_is_still_reached) {
    enum { NPARTS = 8, PART = 64 * BLOCK, SLACK = 4 * BLOCK };
    disk_scene s = disk_scene_open((size_t)NPARTS * PART);
    sk__extent parts[NPARTS];
    for (int i = 0; i < NPARTS; i++) {
        parts[i] = disk_reserve(&s, PART);
    }
    for (int i = 0; i < NPARTS; i += 2) {
        sk__disk_release(s.disk, parts[i]);
    }
    (void)disk_reserve(&s, 3 * PART); /* fits in no gap */
    CHECK_OK(sk__disk_check(s.disk));
    CHECK_EQUAL((NPARTS / 2 + 3) * PART, disk_stats(&s).in_use_bytes);
    CHECK(file_bytes(&s) <= (size_t)NPARTS * PART + SLACK); /* bookkeeping of the file system's */
    (void)disk_reserve(&s, PART); /* what is left is one gap, or was given back as well */
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_space_was_released_then_it_is_used_without_the_system) {
    disk_scene s = disk_scene_open(0);
    sk__extent first = disk_reserve(&s, MIB);
    sk__extent second = disk_reserve(&s, 2 * MIB);
    (void)disk_reserve(&s, MIB);
    sk__disk_release(s.disk, first);
    sk__disk_release(s.disk, second);
    size_t backed = disk_stats(&s).backed_bytes;
    fault_none();                                 /* counts */
    sk__extent again = disk_reserve(&s, 3 * MIB); /* merged */
    CHECK_EQUAL(sk__min(first.offset, second.offset), again.offset);
    sk__disk_release(s.disk, again);
    again = disk_reserve(&s, MIB);
    (void)disk_reserve(&s, 2 * MIB);
    CHECK_EQUAL(0, sk_disk_fault_calls());
    CHECK_EQUAL(backed, disk_stats(&s).backed_bytes);
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_several_gaps_fit_then_the_smallest) {
    disk_scene s = disk_scene_open(0);
    static const size_t sizes[] = {7 * BLOCK, BLOCK, 5 * BLOCK, BLOCK, 40 * BLOCK, BLOCK};
    sk__extent extents[6];
    for (int i = 0; i < 6; i++) {
        extents[i] = disk_reserve(&s, sizes[i]);
    }
    for (int i = 0; i < 6; i += 2) {
        sk__disk_release(s.disk, extents[i]);
    }
    CHECK_EQUAL(extents[2].offset, disk_reserve(&s, 4 * BLOCK).offset);
    CHECK_EQUAL(extents[0].offset, disk_reserve(&s, 6 * BLOCK).offset);
    CHECK_EQUAL(extents[4].offset, disk_reserve(&s, 2 * BLOCK).offset);
    disk_scene_close(&s);
}

SK_TEST(disk, test_release_when_in_any_order_then_merged) {
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                    {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int order = 0; order < 6; order++) {
        disk_scene s = disk_scene_open(0);
        sk__extent extents[3];
        uint64_t lowest = UINT64_MAX;
        for (int i = 0; i < 3; i++) {
            extents[i] = disk_reserve(&s, (size_t)(i + 1) * BLOCK);
            lowest = extents[i].offset < lowest ? extents[i].offset : lowest;
        }
        (void)disk_reserve(&s, BLOCK);
        for (int i = 0; i < 3; i++) {
            sk__disk_release(s.disk, extents[orders[order][i]]);
            CHECK_OK(sk__disk_check(s.disk));
        }
        CHECK_EQUAL(lowest, disk_reserve(&s, 6 * BLOCK).offset);
        CHECK_EQUAL(7 * BLOCK, disk_stats(&s).backed_bytes);
        disk_scene_close(&s);
    }
}

SK_TEST(disk, test_trim_when_space_was_released_then_the_file_system_has_it_back) {
    disk_scene s = disk_scene_open(0);
    sk__extent first = disk_reserve(&s, 4 * MIB);
    sk__extent second = disk_reserve(&s, MIB);
    char *memory = take_memory(MIB);
    bytes_write(memory, MIB, 3);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, MIB, second));
    CHECK(file_bytes(&s) >= 5 * MIB); /* set aside, though not all is written */
    sk__disk_release(s.disk, first);
    CHECK_EQUAL(5 * MIB, disk_stats(&s).backed_bytes);
    CHECK_OK(sk__disk_trim(s.disk));
    CHECK_EQUAL(MIB, disk_stats(&s).backed_bytes);
    CHECK(file_bytes(&s) < 2 * MIB);
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, MIB, second));
    CHECK(bytes_hold(memory, MIB, 3));
    first = disk_reserve(&s, 4 * MIB);
    CHECK(file_bytes(&s) >= 5 * MIB);
    free(memory);
    disk_scene_close(&s);
}

SK_TEST(disk, test_space_when_extents_come_and_go_then_none_overlap_and_sums_hold) {
    enum { NSTEPS = 1500, MOST = 40, LIMIT = 4 * MIB };
    disk_scene s = disk_scene_open(LIMIT);
    sk__extent held[MOST];
    int nheld = 0;
    size_t sum = 0;
    uint64_t state = 11;
    for (int step = 0; step < NSTEPS; step++) {
        if (nheld < MOST && random_below(&state, 5) < 3) {
            size_t nbytes = 1 + random_below(&state, 60 * BLOCK);
            sk_status status = sk__disk_reserve(s.disk, nbytes, &held[nheld]);
            bool fits = sum + sk__round_up(nbytes, BLOCK) <= LIMIT;
            CHECK_STATUS(fits ? SK_OK : SK_OUT_OF_DISK, status);
            sum += fits ? held[nheld].nbytes : 0;
            for (int i = 0; fits && i < nheld; i++) {
                CHECK(held[i].offset + held[i].nbytes <= held[nheld].offset ||
                      held[nheld].offset + held[nheld].nbytes <= held[i].offset);
            }
            nheld += fits;
        } else if (nheld > 0) {
            int index = (int)random_below(&state, (size_t)nheld);
            sum -= held[index].nbytes;
            sk__disk_release(s.disk, held[index]);
            held[index] = held[--nheld];
        }
        CHECK_OK(random_below(&state, 100) == 0 ? sk__disk_trim(s.disk) : SK_OK);
        CHECK_OK(sk__disk_check(s.disk));
        CHECK_EQUAL(sum, disk_stats(&s).in_use_bytes);
        CHECK(disk_stats(&s).backed_bytes <= LIMIT);
    }
    CHECK(file_bytes(&s) <= LIMIT + 16 * BLOCK); /* the file system's own bookkeeping */
    disk_scene_close(&s);
}

/* ---- misuse ---------------------------------------------------------------------------------- */

static void never_done(sk__disk_request *request, sk_status status) {
    (void)request;
    (void)status;
    CHECK(false);
}

SK_TEST(disk, test_calls_when_arguments_are_wrong_then_refused) {
    disk_scene s = disk_scene_open(0);
    sk__disk *other = NULL;
    CHECK_STATUS(SK_INVALID, sk__disk_open("", 0, &other));
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_open("/nonexistent/folder", 0, &other));
    CHECK_CONTAINS(sk_error_text(), "/nonexistent/folder");
    CHECK_CONTAINS(sk_error_text(), strerror(ENOENT));
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_open("/dev/null", 0, &other));
    CHECK(other == NULL);
    sk__disk_close(NULL);
    sk__extent extent = {0};
    CHECK_STATUS(SK_INVALID, sk__disk_reserve(s.disk, 0, &extent));
    CHECK_STATUS(SK_INVALID, sk__disk_reserve(s.disk, SIZE_MAX, &extent));
    extent = disk_reserve(&s, BLOCK);
    char bytes[2] = {0};
    sk__disk_request good = {
        .memory = bytes, .nbytes = 1, .extent = extent, .done = never_done, .way = SK_DISK_READ};
    sk__disk_request wrong = good;
    wrong.memory = NULL;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong = good;
    wrong.done = NULL;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong = good;
    wrong.way = SK_DISK_WAYS;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, NULL));
    wrong = good;
    wrong.nbytes = 0;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong.nbytes = BLOCK + 1;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong = good;
    wrong.extent.offset += BLOCK;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong = good;
    wrong.extent.nbytes += BLOCK;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    wrong = good;
    wrong.extent.tile = NULL;
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &wrong));
    sk__disk_release(s.disk, extent);
    CHECK_STATUS(SK_INVALID, sk__disk_submit(s.disk, &good));
    disk_scene_close(&s);
}
