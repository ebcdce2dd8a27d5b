/* test_cpu.c - the cpu backend's own promises: streams really are asynchronous, limits hold. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/cpu.h"
#include "fixture.h"

static uint64_t now_ns(void) {
    enum { NS_PER_S = 1000000000 };
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

SK_TEST(cpu, test_cpu_when_capacity_is_0_then_that_of_the_machine) {
    sk_cpu_params params = {0};
    sk_backend *backend = NULL;
    CHECK_STATUS(SK_INVALID, sk_backend_cpu(NULL, &backend));
    CHECK_OK(sk_backend_cpu(&params, &backend));
    sk_memory_info info = {0};
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK(info.total_bytes >= 64 * MIB);
    CHECK(info.total_bytes <= (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE));
    sk_memory_info machine = {0};
    CHECK_OK(sk__cpu_machine_memory(&machine));
    CHECK_EQUAL(machine.total_bytes, info.total_bytes);
    sk_backend_close(backend);
}

/* ---- control groups -------------------------------------------------------------------------- */

enum { PATH_BYTES = 128 };

/* Write a file of a made-up control group; folders on the way are made. */
static void group_file(const char *root, const char *name, const char *text) {
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash != NULL;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, S_IRWXU);
        *slash = '/';
    }
    FILE *file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK(fclose(file) == 0);
}

/* What a machine of 1000 bytes, 900 of them free, is left with by control groups. */
static sk_memory_info group_limits(const char *root, const char *list) {
    char path[PATH_BYTES];
    group_file(root, "list", list);
    (void)snprintf(path, sizeof path, "%s/list", root);
    sk_memory_info info = {.free_bytes = 900, .total_bytes = 1000};
    sk__cpu_groups_apply(path, root, &info);
    return info;
}

SK_TEST(cpu, test_memory_when_control_groups_limit_it_then_the_tightest_holds) {
    char root[] = "/tmp/swapkit-test-XXXXXX";
    CHECK(mkdtemp(root) != NULL);
    group_file(root, "memory.max", "800\n");
    group_file(root, "outer/memory.max", "500\n");
    group_file(root, "outer/memory.current", "420\n");
    group_file(root, "outer/inner/memory.max", "max\n");
    group_file(root, "memory/old/memory.limit_in_bytes", "300\n");
    group_file(root, "memory/old/memory.usage_in_bytes", "310\n");
    sk_memory_info second = group_limits(root, "1:name=systemd:/old\n0::/outer/inner\n");
    sk_memory_info first = group_limits(root, "12:cpu:/old\n4:memory:/old\n0::/\n");
    sk_memory_info none = group_limits(root, "12:cpu:/old\nnonsense\n");
    sk_memory_info absent = {.free_bytes = 1, .total_bytes = 2};
    sk__cpu_groups_apply("/nowhere/list", root, &absent);
    char command[PATH_BYTES];
    (void)snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQUAL(0, system(command)); /* NOLINT: a folder of our own */
    CHECK_EQUAL(500, second.total_bytes);
    CHECK_EQUAL(80, second.free_bytes);
    CHECK_EQUAL(300, first.total_bytes);
    CHECK_EQUAL(0, first.free_bytes);
    CHECK_EQUAL(1000, none.total_bytes);
    CHECK_EQUAL(900, none.free_bytes);
    CHECK_EQUAL(2, absent.total_bytes);
}

/* ---- pages and nodes ------------------------------------------------------------------------- */

enum { RANGE_BYTES = 4 * MIB, PARTS = 64 };

/* How many 64ths of a range have pages. */
static size_t resident_parts(void *address, size_t nbytes) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *pages = malloc(nbytes / page_bytes);
    CHECK(pages != NULL);
    CHECK(mincore(address, nbytes, pages) == 0);
    size_t count = 0;
    for (size_t i = 0; i < nbytes / page_bytes; i++) {
        count += pages[i] & 1;
    }
    free(pages);
    return count * page_bytes / (nbytes / PARTS);
}

static void populate_check(bool populate, size_t expected) {
    sk_cpu_params params = {.capacity_bytes = CAPACITY, .populate = populate};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    void *range = NULL;
    void *segment = NULL;
    CHECK_OK(backend->ops.range_reserve(backend->self, RANGE_BYTES, &range));
    CHECK_EQUAL(0, resident_parts(range, RANGE_BYTES));
    CHECK_OK(backend->ops.range_commit(backend->self, range, RANGE_BYTES / 2));
    CHECK_EQUAL(expected / 2, resident_parts(range, RANGE_BYTES));
    CHECK_OK(backend->ops.range_decommit(backend->self, range, RANGE_BYTES / 2));
    CHECK_EQUAL(0, resident_parts(range, RANGE_BYTES));
    CHECK_OK(backend->ops.range_release(backend->self, range, RANGE_BYTES));
    CHECK_OK(backend->ops.memory_alloc(backend->self, RANGE_BYTES, &segment));
    CHECK_EQUAL(expected, resident_parts(segment, RANGE_BYTES));
    CHECK_OK(backend->ops.memory_free(backend->self, segment, RANGE_BYTES));
    sk_backend_close(backend);
}

SK_TEST(cpu, test_commit_when_populating_then_its_pages_are_there_at_once) {
    enum { POPULATE_WRITE = 23 };
    char *page = mmap(NULL, ROUNDING, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    int refused = madvise(page, ROUNDING, POPULATE_WRITE);
    (void)munmap(page, ROUNDING);
    if (refused != 0) {
        test_skip("this kernel has no MADV_POPULATE_WRITE");
    }
    populate_check(true, PARTS);
}

SK_TEST(cpu, test_commit_when_not_populating_then_pages_come_with_the_first_touch) {
    populate_check(false, 0);
}

/* Whether the kernel lets anybody read a byte. */
static bool can_read(const void *address) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    bool can = write(ends[1], address, 1) == 1;
    CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
    return can;
}

static void range_move(sk_backend *backend, char *from, char *to, size_t nbytes) {
    size_t before = device_bytes(backend);
    CHECK_OK(backend->ops.range_move(backend->self, from, to, nbytes));
    CHECK_EQUAL(before, device_bytes(backend));
    CHECK(!can_read(from) && !can_read(from + nbytes - 1));
    CHECK(can_read(to) && can_read(to + nbytes - 1));
}

SK_TEST(cpu, test_move_when_memory_has_pages_then_they_go_along_and_nothing_stays) {
    sk_backend *backend = make_cpu(CAPACITY);
    void *start = NULL;
    CHECK_OK(backend->ops.range_reserve(backend->self, RANGE_BYTES, &start));
    char *range = start;
    CHECK_OK(backend->ops.range_commit(backend->self, range, MIB));
    memset(range, 1, MIB);
    /* Both halves of what lies at 2 MiB then come from somewhere else. */
    range_move(backend, range, range + 2 * MIB + MIB / 2, MIB / 2);
    range_move(backend, range + MIB / 2, range + 2 * MIB, MIB / 2);
    CHECK_EQUAL(0, resident_parts(range, 2 * MIB));
    range_move(backend, range + 2 * MIB, range, MIB);
    CHECK_EQUAL(PARTS / (RANGE_BYTES / MIB), resident_parts(range, RANGE_BYTES));
    memset(range, 2, MIB);
    CHECK_OK(backend->ops.range_decommit(backend->self, range, MIB));
    CHECK_EQUAL(0, resident_parts(range, RANGE_BYTES));
    CHECK_OK(backend->ops.range_release(backend->self, range, RANGE_BYTES));
    sk_backend_close(backend);
}

SK_TEST(cpu, test_move_when_it_is_little_of_much_memory_then_refused_and_nothing_changes) {
    sk_backend *backend = make_cpu(1024 * (size_t)MIB);
    void *start = NULL;
    const size_t much = 1023 * (size_t)MIB;
    CHECK_OK(backend->ops.range_reserve(backend->self, much + GRANULE, &start));
    char *range = start;
    CHECK_OK(backend->ops.range_commit(backend->self, range, much));
    CHECK_STATUS(SK_UNSUPPORTED,
                 backend->ops.range_move(backend->self, range, range + much, GRANULE));
    CHECK(can_read(range) && !can_read(range + much));
    CHECK_OK(backend->ops.range_decommit(backend->self, range, much));
    CHECK_OK(backend->ops.range_release(backend->self, range, much + GRANULE));
    sk_backend_close(backend);
}

/* The policy of the range that a backend reserves, and in `nodes` which nodes it names. */
static int policy_of_range(uint64_t numa_nodes, uint64_t *nodes) {
    enum { BY_ADDRESS = 2, NODES = 1024 };
    sk_cpu_params params = {.capacity_bytes = CAPACITY, .numa_nodes = numa_nodes};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    void *range = NULL;
    CHECK_OK(backend->ops.range_reserve(backend->self, RANGE_BYTES, &range));
    CHECK_OK(backend->ops.range_commit(backend->self, range, RANGE_BYTES));
    memset(range, 1, RANGE_BYTES);
    uint64_t mask[NODES / 64] = {0};
    int policy = -1;
    long refused = syscall(SYS_get_mempolicy, &policy, mask, NODES, range, BY_ADDRESS);
    CHECK_OK(backend->ops.range_decommit(backend->self, range, RANGE_BYTES));
    CHECK_OK(backend->ops.range_release(backend->self, range, RANGE_BYTES));
    sk_backend_close(backend);
    if (refused != 0) {
        test_skip("this kernel tells nothing of NUMA nodes");
    }
    *nodes = mask[0];
    return policy;
}

SK_TEST(cpu, test_range_when_a_node_is_named_then_its_memory_is_preferred) {
    enum { DEFAULT = 0, PREFERRED = 1, PREFERRED_MANY = 5 };
    uint64_t nodes = 0;
    CHECK_EQUAL(DEFAULT, policy_of_range(0, &nodes));
    int policy = policy_of_range(1, &nodes);
    CHECK(policy == PREFERRED || policy == PREFERRED_MANY);
    CHECK_EQUAL(1, nodes);
    CHECK_EQUAL(DEFAULT, policy_of_range((uint64_t)1 << 63, &nodes)); /* there is none: ignored */
}

SK_TEST(cpu, test_cpu_when_out_null_then_invalid) {
    sk_cpu_params params = {.capacity_bytes = CAPACITY};
    CHECK_STATUS(SK_INVALID, sk_backend_cpu(&params, NULL));
}

SK_TEST(cpu, test_cpu_when_capacity_absurd_then_error_and_nothing_made) {
    sk_cpu_params params = {.capacity_bytes = SIZE_MAX};
    sk_backend *backend = NULL;
    CHECK_STATUS(SK_INVALID, sk_backend_cpu(&params, &backend));
    CHECK(backend == NULL);
}

SK_TEST(cpu, test_memory_when_committed_again_then_reads_as_zero) {
    fixture f = fixture_open(0, false);
    unsigned char *block = take(&f, 4 * MIB, NULL);
    memset(block, 1, 4 * MIB);
    give(&f, block);
    CHECK_OK(sk_pool_trim(f.pool));
    unsigned char *again = take(&f, 4 * MIB, NULL);
    CHECK(again[0] == 0 && again[4 * MIB - 1] == 0);
    give(&f, again);
    fixture_close(&f);
}

SK_TEST(cpu, test_copy_when_bandwidth_limited_then_takes_at_least_that_long) {
    enum { NBYTES = 4 * MIB, PER_S = 400 * MIB, NS_PER_MS = 1000000, LEAST_MS = 9 };
    sk_cpu_params params = {.capacity_bytes = CAPACITY, .copy_bytes_per_s = PER_S};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    sk_stream *stream = make_stream(backend);
    unsigned char *from = calloc(1, NBYTES);
    unsigned char *to = calloc(1, NBYTES);
    CHECK(from != NULL && to != NULL);
    pattern_write(from, NBYTES, 5);
    uint64_t begin = now_ns();
    CHECK_OK(sk_copy_async(backend, to, from, NBYTES, SK_DEVICE_TO_HOST, stream));
    CHECK_OK(sk_stream_sync(backend, stream));
    CHECK(now_ns() - begin >= (uint64_t)LEAST_MS * NS_PER_MS);
    CHECK(pattern_holds(to, NBYTES, 5));
    drop_stream(backend, stream);
    sk_backend_close(backend);
    free(from);
    free(to);
}

SK_TEST(cpu, test_copy_when_latency_given_then_every_copy_pays_it) {
    enum { LATENCY_NS = 2000000, NCOPIES = 4 };
    sk_cpu_params params = {.capacity_bytes = CAPACITY, .copy_latency_ns = LATENCY_NS};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    sk_stream *stream = make_stream(backend);
    char from[ROUNDING] = {0};
    char to[ROUNDING];
    uint64_t begin = now_ns();
    for (int i = 0; i < NCOPIES; i++) {
        CHECK_OK(sk_copy_async(backend, to, from, sizeof to, SK_DEVICE_TO_HOST, stream));
    }
    CHECK_OK(sk_stream_sync(backend, stream));
    CHECK(now_ns() - begin >= (uint64_t)NCOPIES * LATENCY_NS);
    drop_stream(backend, stream);
    sk_backend_close(backend);
}

/* Limit the process's address space to `spare_bytes` more than it has; the old limit comes back. */
static struct rlimit limit_addresses(size_t spare_bytes) {
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_AS, &before) == 0);
    FILE *statm = fopen("/proc/self/statm", "re");
    CHECK(statm != NULL);
    unsigned long npages = 0;
    int nread = fscanf(statm, "%lu", &npages);
    (void)fclose(statm);
    CHECK(nread == 1);
    struct rlimit now = before;
    now.rlim_cur = npages * (size_t)sysconf(_SC_PAGESIZE) + spare_bytes;
    CHECK(setrlimit(RLIMIT_AS, &now) == 0);
    return before;
}

static void few_addresses(bool whole) {
#ifdef SK_TEST_SANITISED
    test_skip("sanitisers need an address space without limit");
#endif
    sk_pool_params params = {.whole_segments = whole};
    fixture f = {.backend = make_cpu((size_t)64 * 1024 * MIB)};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    give(&f, take(&f, 1, NULL)); /* whatever is needed once is there now */
    CHECK_OK(sk_pool_trim(f.pool));
    struct rlimit before = limit_addresses(64 * MIB);
    void *some = NULL;
    sk_status fits = sk_pool_take(f.pool, 40 * MIB, NULL, &some);
    void *more = NULL;
    sk_status too_much = sk_pool_take(f.pool, 80 * MIB, NULL, &more);
    CHECK(setrlimit(RLIMIT_AS, &before) == 0);
    CHECK_STATUS(SK_OK, fits);
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, too_much);
    CHECK_OK(sk_pool_check(f.pool));
    give(&f, some);
    give(&f, take(&f, 80 * MIB, NULL));
    fixture_close(&f);
}

/* The pool asks for ranges as wide as the device; narrower ones must do, then whole segments too.
 */
SK_TEST(cpu, test_take_when_addresses_are_limited_then_ranges_are_narrower) {
    few_addresses(false);
}

SK_TEST(cpu, test_take_when_addresses_are_limited_then_segments_fail_cleanly) {
    few_addresses(true);
}

/* The kernel limits the number of mappings of a process (vm.max_map_count, usually 65530), and
 * every hole in committed memory costs two. What cannot be given back stays cached, and is used
 * again. */
SK_TEST(cpu, test_trim_when_holes_exceed_the_kernels_mappings_then_pool_still_works) {
    enum { NBLOCKS = 80000 };
#if defined SK_TEST_SANITISED || defined SK_TEST_COVERAGE
    test_skip("takes minutes in an instrumented build");
#endif
    fixture f = {.backend = make_cpu((size_t)16 * 1024 * MIB)};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    void **blocks = calloc(NBLOCKS, sizeof *blocks);
    CHECK(blocks != NULL);
    for (int i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(&f, GRANULE, NULL); /* not touched: costs no memory */
    }
    for (int i = 0; i < NBLOCKS; i += 2) {
        give(&f, blocks[i]);
    }
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_OK(sk_pool_check(f.pool));
    for (int i = 0; i < NBLOCKS; i += 2) {
        blocks[i] = take(&f, GRANULE, NULL);
    }
    for (int i = 0; i < NBLOCKS; i++) {
        give(&f, blocks[i]);
    }
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_EQUAL(0, stats_of(&f).reserved_bytes[0].current);
    free(blocks);
    fixture_close(&f);
}
