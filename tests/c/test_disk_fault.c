/* test_disk_fault.c - a disk when the system refuses: full, broken, short.
 *
 * The nth call of the system fails, n = 1, 2, ... until a run has no failure: once with a single
 * failure, once with every call from the nth on failing. Afterwards every structure is sound,
 * everything held can be given back and the disk works.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disk/handle.h"
#include "disk_fixture.h"

/* ---- full ------------------------------------------------------------------------------------ */

SK_TEST(disk, test_reserve_when_the_file_system_is_full_then_refused_with_the_figures) {
    disk_scene s = disk_scene_open(0);
    sk__extent kept = disk_reserve(&s, BLOCK);
    static const int errors[] = {ENOSPC, EDQUOT, EFBIG};
    for (int i = 0; i < 3; i++) {
        fault_calls(SK_DISK_CALL_ALLOCATE, 1, true, errors[i]);
        sk__extent refused;
        CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, MIB, &refused));
        CHECK_CONTAINS(sk_error_text(), "no room for 1048576 bytes");
        CHECK_CONTAINS(sk_error_text(), "4096 are in use");
        CHECK_CONTAINS(sk_error_text(), "free; make room there or choose another folder");
        CHECK_CONTAINS(sk_error_text(), s.folder);
        CHECK_EQUAL(BLOCK, disk_stats(&s).backed_bytes);
        check_usable(&s);
    }
    fault_calls(SK_DISK_CALL_ALLOCATE | SK_DISK_CALL_GIVE_BACK, 1, false, EIO);
    sk__extent refused;
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_reserve(s.disk, MIB, &refused));
    CHECK_EQUAL(2, sk_disk_fault_calls()); /* what it may have got is given back */
    CHECK_CONTAINS(sk_error_text(), strerror(EIO));
    sk__disk_release(s.disk, kept);
    check_usable(&s);
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_full_but_released_space_is_kept_then_that_is_given_back_first) {
    disk_scene s = disk_scene_open(0);
    sk__extent first = disk_reserve(&s, MIB);
    sk__disk_release(s.disk, first);
    fault_calls(SK_DISK_CALL_ALLOCATE, 1, false, ENOSPC);
    (void)disk_reserve(&s, 2 * MIB);
    CHECK_EQUAL(2, sk_disk_fault_calls());
    CHECK_EQUAL(2 * MIB, disk_stats(&s).backed_bytes);
    check_usable(&s);
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_full_and_kept_space_is_not_taken_back_then_it_stays_kept) {
    disk_scene s = disk_scene_open(0);
    sk__extent first = disk_reserve(&s, MIB);
    sk__disk_release(s.disk, first);
    fault_calls(SK_DISK_CALL_ALLOCATE | SK_DISK_CALL_GIVE_BACK, 1, true, ENOSPC);
    sk__extent refused;
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, 2 * MIB, &refused));
    CHECK_CONTAINS(sk_error_text(), "no room for 2097152 bytes");
    CHECK_EQUAL(MIB, disk_stats(&s).backed_bytes);
    CHECK_EQUAL(0, disk_stats(&s).in_use_bytes);
    (void)disk_reserve(&s, MIB); /* from what is kept, without the system */
    check_usable(&s);
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_at_the_limit_and_giving_back_fails_then_that_is_said) {
    disk_scene s = disk_scene_open(4 * BLOCK);
    sk__extent extents[4];
    for (int i = 0; i < 4; i++) {
        extents[i] = disk_reserve(&s, BLOCK);
    }
    sk__disk_release(s.disk, extents[0]);
    sk__disk_release(s.disk, extents[2]);
    fault_calls(SK_DISK_CALL_GIVE_BACK, 1, true, EIO);
    sk__extent twice;
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_reserve(s.disk, 2 * BLOCK, &twice));
    CHECK_CONTAINS(sk_error_text(), strerror(EIO));
    CHECK_EQUAL(4 * BLOCK, disk_stats(&s).backed_bytes);
    CHECK_OK(sk__disk_check(s.disk));
    fault_none();
    CHECK_OK(sk__disk_reserve(s.disk, 2 * BLOCK, &twice));
    disk_scene_close(&s);
}

static void reserve_without_setting_aside(int error) {
    fault_calls(SK_DISK_CALL_ALLOCATE, 1, true, error);
    disk_scene s = disk_scene_open(0);
    char *memory = take_filled(MIB, 1);
    sk__extent extent = disk_reserve(&s, MIB);
    (void)disk_reserve(&s, MIB);
    CHECK_EQUAL(1, sk_disk_fault_calls()); /* not asked again */
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, MIB - 1, extent));
    memset(memory, 0, MIB);
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, MIB - 1, extent));
    CHECK(bytes_hold(memory, MIB - 1, 1));
    sk__extent refused;
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, (size_t)1 << 45, &refused));
    check_usable(&s);
    free(memory);
    disk_scene_close(&s);
}

SK_TEST(disk, test_reserve_when_space_cannot_be_set_aside_then_works_without) {
    reserve_without_setting_aside(EOPNOTSUPP);
    reserve_without_setting_aside(ENOSYS);
}

SK_TEST(disk, test_reserve_when_space_cannot_be_given_back_then_the_limit_holds) {
    disk_scene s = disk_scene_open(4 * BLOCK);
    sk__extent extents[4];
    for (int i = 0; i < 4; i++) {
        extents[i] = disk_reserve(&s, BLOCK);
    }
    sk__disk_release(s.disk, extents[0]);
    sk__disk_release(s.disk, extents[2]);
    fault_calls(SK_DISK_CALL_GIVE_BACK, 1, true, EOPNOTSUPP);
    sk__extent refused;
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(s.disk, 2 * BLOCK, &refused));
    CHECK_STATUS(SK_UNSUPPORTED, sk__disk_trim(s.disk));
    fault_calls(SK_DISK_CALL_GIVE_BACK, 1, true, ENOSYS);
    CHECK_STATUS(SK_UNSUPPORTED, sk__disk_trim(s.disk));
    CHECK_EQUAL(4 * BLOCK, disk_stats(&s).backed_bytes);
    (void)disk_reserve(&s, BLOCK);
    (void)disk_reserve(&s, BLOCK);
    fault_none();
    disk_scene_close(&s);
}

/* A real file system of a megabyte, seen by one child only. */
static int fill_small_disk(disk_scene *scene, void *argument) {
    enum { SMALL = MIB, PART = 64 * KIB };
    const char *folder = argument;
    (void)scene;
    char map[64];
    (void)snprintf(map, sizeof map, "0 %u 1", (unsigned)geteuid());
    if (unshare(CLONE_NEWNS) != 0) {
        EXPECT(unshare(CLONE_NEWNS | CLONE_NEWUSER) == 0);
        int fd = open("/proc/self/uid_map", O_WRONLY | O_CLOEXEC);
        EXPECT(write(fd, map, strlen(map)) == (ssize_t)strlen(map));
        (void)close(fd);
    }
    (void)mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
    EXPECT(mount("tmpfs", folder, "tmpfs", 0, "size=1m") == 0);
    sk__disk *disk = NULL;
    EXPECT(sk__disk_open(folder, 0, &disk) == SK_OK);
    sk__extent extents[SMALL / PART];
    size_t count = 0;
    sk_status status = SK_OK;
    while (count < SMALL / PART && status == SK_OK) {
        status = sk__disk_reserve(disk, PART, &extents[count]);
        count += status == SK_OK;
    }
    EXPECT(count >= SMALL / PART - 1);
    sk__extent refused;
    EXPECT(sk__disk_reserve(disk, 2 * PART, &refused) == SK_OUT_OF_DISK);
    EXPECT(strstr(sk_error_text(), "the file system") != NULL);
    EXPECT(strstr(sk_error_text(), folder) != NULL);
    EXPECT(sk__disk_check(disk) == SK_OK);
    /* Two gaps that are not neighbours make room for one extent of twice the size. */
    sk__disk_release(disk, extents[1]);
    sk__disk_release(disk, extents[3]);
    EXPECT(sk__disk_reserve(disk, 2 * PART, &refused) == SK_OK);
    EXPECT(sk__disk_check(disk) == SK_OK);
    sk__disk_close(disk);
    EXPECT(sk__disk_open(folder, 0, &disk) == SK_OK); /* the space is back */
    EXPECT(sk__disk_reserve(disk, SMALL / 2, &refused) == SK_OK);
    sk__disk_close(disk);
    return 0;
}

/* Whether a child may mount something of its own. */
static bool can_mount(void) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        _exit(unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWNS | CLONE_NEWUSER) == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

SK_TEST(disk, test_reserve_when_a_real_file_system_is_full_then_refused_and_usable) {
    if (!can_mount()) {
        test_skip("no small file system can be mounted here");
    }
    char folder[FOLDER_CHARS];
    make_folder(folder);
    disk_in_child(fill_small_disk, NULL, folder);
    drop_folder(folder);
}

/* ---- reading and writing fail ---------------------------------------------------------------- */

typedef struct failure {
    sk__disk_way way;
    int error; /* 0: the call moves nothing */
    sk_status status;
    const char *text;
} failure;

static const failure failures[] = {
    {SK_DISK_WRITE, EIO, SK_DISK_FAILED, "Input/output error"},
    {SK_DISK_READ, EIO, SK_DISK_FAILED, "Input/output error"},
    {SK_DISK_WRITE, ENOSPC, SK_OUT_OF_DISK, "No space left"},
    {SK_DISK_WRITE, EDQUOT, SK_OUT_OF_DISK, "quota"},
    {SK_DISK_WRITE, 0, SK_OUT_OF_DISK, "No space left"},
    {SK_DISK_READ, 0, SK_DISK_FAILED, "No data"},
};

SK_TEST(disk, test_move_when_the_system_fails_then_the_request_says_why) {
    enum { SIZE = 3 * SK_PIECE_BYTES + 100 };
    disk_scene s = disk_scene_open(0);
    char *memory = take_filled(SIZE, 5);
    sk__extent extent = disk_reserve(&s, SIZE);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        const failure *f = &failures[i];
        for (uint64_t nth = 1; nth <= 4; nth++) {
            unsigned call = f->way == SK_DISK_WRITE ? SK_DISK_CALL_WRITE : SK_DISK_CALL_READ;
            fault_calls(call, nth, nth % 2 == 0, f->error);
            job job;
            job_submit(&s, &job, f->way, memory, SIZE, extent);
            CHECK_STATUS(f->status, job_wait(&job));
            CHECK_CONTAINS(job.request.text, f->text);
            CHECK_CONTAINS(job.request.text, s.folder);
            CHECK_CONTAINS(job.request.text, f->way == SK_DISK_WRITE ? "writing" : "reading");
            CHECK_CONTAINS(job.request.text, " bytes at ");
            check_usable(&s);
            CHECK_EQUAL(1, job.ndone);
        }
    }
    bytes_write(memory, SIZE, 6);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    memset(memory, 0, SIZE);
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, SIZE, extent));
    CHECK(bytes_hold(memory, SIZE, 6));
    free(memory);
    disk_scene_close(&s);
}

SK_TEST(disk, test_move_when_one_request_fails_then_the_others_do_not) {
    enum { NJOBS = 6 };
    disk_scene s = disk_scene_open(0);
    char *memory = take_filled(BLOCK, 1);
    job jobs[NJOBS];
    fault_calls(SK_DISK_CALL_WRITE, 3, false, EIO);
    int nfailed = 0;
    for (int i = 0; i < NJOBS; i++) {
        job_submit(&s, &jobs[i], SK_DISK_WRITE, memory, BLOCK, disk_reserve(&s, BLOCK));
    }
    for (int i = 0; i < NJOBS; i++) {
        nfailed += job_wait(&jobs[i]) != SK_OK;
    }
    CHECK_EQUAL(1, nfailed);
    check_usable(&s);
    free(memory);
    disk_scene_close(&s);
}

/* Write and read while calls move less than they were asked to. */
static void move_in_parts(disk_scene *s, unsigned calls, bool forever, size_t short_bytes) {
    enum { SIZE = 40 * BLOCK + 33 };
    char *memory = take_filled(SIZE, 8);
    sk__extent extent = disk_reserve(s, SIZE);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        fault_short(calls, nth, forever, short_bytes);
        CHECK_OK(disk_move(s, SK_DISK_WRITE, memory, SIZE, extent));
        memset(memory, 0, SIZE);
        CHECK_OK(disk_move(s, SK_DISK_READ, memory, SIZE, extent));
        CHECK(bytes_hold(memory, SIZE, 8));
        uint64_t ncalls = forever && short_bytes <= BLOCK ? SIZE / BLOCK : 2;
        CHECK(nth > 1 || sk_disk_fault_calls() >= ncalls);
    }
    free(memory);
    sk__disk_release(s->disk, extent);
    check_usable(s);
}

SK_TEST(disk, test_move_when_calls_are_short_then_continued) {
    static const size_t shorts[] = {BLOCK, 5 * BLOCK, 100}; /* the last ends direct I/O */
    static const unsigned calls[] = {SK_DISK_CALL_WRITE, SK_DISK_CALL_READ};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 2; j++) {
            disk_scene s = disk_scene_open(0);
            bool was_direct = disk_stats(&s).is_direct;
            move_in_parts(&s, calls[j], false, shorts[i]);
            move_in_parts(&s, calls[j], true, shorts[i]);
            bool is_block = shorts[i] % BLOCK == 0;
            CHECK_EQUAL(was_direct && is_block, disk_stats(&s).is_direct);
            disk_scene_close(&s);
        }
    }
}

SK_TEST(disk, test_calls_when_interrupted_then_repeated) {
    enum { SIZE = 2 * BLOCK };
    for (int mode = 0; mode < 2; mode++) {
        fault_calls(SK_DISK_CALL_DIRECT, mode == 0 ? 0 : 1, false, EINVAL);
        disk_scene s = disk_scene_open(0);
        char *memory = take_filled(SIZE, 4);
        static const unsigned calls[] = {SK_DISK_CALL_ALLOCATE, SK_DISK_CALL_GIVE_BACK,
                                         SK_DISK_CALL_WRITE, SK_DISK_CALL_READ, SK_DISK_CALL_FLUSH};
        for (int i = 0; i < 5; i++) {
            fault_calls(calls[i], 1, false, EINTR);
            sk__extent extent = disk_reserve(&s, SIZE);
            CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
            CHECK_OK(disk_move(&s, SK_DISK_READ, memory, SIZE, extent));
            sk__disk_release(s.disk, extent);
            CHECK_OK(sk__disk_trim(s.disk));
            CHECK_EQUAL(calls[i] == SK_DISK_CALL_FLUSH && mode == 0 ? 0 : 2, sk_disk_fault_calls());
        }
        check_usable(&s);
        free(memory);
        disk_scene_close(&s);
    }
}

/* Pages of the file that are in the page cache. */
static size_t cached_pages(disk_scene *s, size_t nbytes) {
    size_t npages = nbytes / BLOCK;
    unsigned char *resident = calloc(npages, 1);
    int fd = s->disk->file.fd;
    void *map = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(resident != NULL && map != MAP_FAILED);
    CHECK(mincore(map, nbytes, resident) == 0);
    size_t count = 0;
    for (size_t i = 0; i < npages; i++) {
        count += resident[i] & 1;
    }
    CHECK(munmap(map, nbytes) == 0);
    free(resident);
    return count;
}

SK_TEST(disk, test_move_when_through_the_page_cache_then_it_does_not_grow) {
    enum { SIZE = 16 * MIB };
    fault_calls(SK_DISK_CALL_DIRECT, 1, false, EINVAL);
    disk_scene s = disk_scene_open(0);
    CHECK(!disk_stats(&s).is_direct);
    fault_none();
    struct statfs system;
    CHECK(fstatfs(s.disk->file.fd, &system) == 0);
    if (system.f_type == TMPFS_MAGIC) {
        disk_scene_close(&s);
        test_skip("the folder for temporary files is memory itself");
    }
    struct stat about;
    char *memory = take_filled(SIZE, 2);
    sk__extent extent = disk_reserve(&s, SIZE);
    CHECK(fstat(s.disk->file.fd, &about) == 0 && about.st_size == SIZE);
    CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    CHECK(cached_pages(&s, SIZE) < SIZE / BLOCK / 8);
    CHECK_OK(disk_move(&s, SK_DISK_READ, memory, SIZE, extent));
    CHECK(cached_pages(&s, SIZE) < SIZE / BLOCK / 8);
    CHECK(bytes_hold(memory, SIZE, 2));
    static const int harmless[] = {EINVAL, ESPIPE, ENOSYS};
    for (int i = 0; i < 3; i++) {
        fault_calls(SK_DISK_CALL_FLUSH, 1, true, harmless[i]);
        CHECK_OK(disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    }
    fault_calls(SK_DISK_CALL_FLUSH, 2, false, EIO);
    CHECK_STATUS(SK_DISK_FAILED, disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    fault_calls(SK_DISK_CALL_FLUSH, 2, false, ENOSPC);
    CHECK_STATUS(SK_OUT_OF_DISK, disk_move(&s, SK_DISK_WRITE, memory, SIZE, extent));
    check_usable(&s);
    free(memory);
    disk_scene_close(&s);
}

/* ---- the nth call fails ---------------------------------------------------------------------- */

enum { LOOP_SIZE = SK_PIECE_BYTES + 10, LOOP_LIMIT = 12 * MIB, LOOP_MOST = 200 };

static bool is_failure(sk_status status) {
    return status == SK_OUT_OF_DISK || status == SK_DISK_FAILED || status == SK_OUT_OF_HOST_MEMORY;
}

/* Reserve, write, read, release, trim; steps may fail. Returns how many did. */
static int play(disk_scene *s, char *memory) {
    sk__extent extents[3];
    bool held[3] = {false};
    int nfailed = 0;
    for (unsigned i = 0; i < 3; i++) {
        size_t nbytes = i == 0 ? LOOP_SIZE : 2 * BLOCK;
        sk_status status = sk__disk_reserve(s->disk, nbytes, &extents[i]);
        held[i] = status == SK_OK;
        CHECK(held[i] || is_failure(status));
        for (sk__disk_way way = SK_DISK_WRITE; status == SK_OK && way < SK_DISK_WAYS; way++) {
            job mine = {.ndone = 0};
            pattern_write(memory, nbytes, way == SK_DISK_WRITE ? i : i + 100);
            job_submit(s, &mine, way, memory, nbytes, extents[i]);
            status = job_wait(&mine);
            CHECK(status == SK_OK || (is_failure(status) && mine.request.text[0] != '\0'));
            CHECK(status != SK_OK || pattern_holds(memory, nbytes, i));
        }
        nfailed += status != SK_OK;
    }
    if (held[0]) {
        sk__disk_release(s->disk, extents[0]);
    }
    sk__extent larger;
    sk_status status = sk__disk_reserve(s->disk, LOOP_SIZE + MIB, &larger);
    nfailed += status != SK_OK;
    if (status == SK_OK) {
        sk__disk_release(s->disk, larger);
    }
    nfailed += sk__disk_trim(s->disk) != SK_OK;
    for (int i = 1; i < 3; i++) {
        if (held[i]) {
            sk__disk_release(s->disk, extents[i]);
        }
    }
    return nfailed;
}

SK_TEST(disk, test_fault_when_each_call_fails_then_sound_and_usable) {
    static const int errors[] = {EIO, ENOSPC, EINVAL};
    char *memory = take_filled(LOOP_SIZE, 0);
    for (int mode = 0; mode < 12; mode++) {
        bool forever = mode % 2 == 1;
        bool buffered = mode / 2 % 2 == 1;
        int error = errors[mode / 4];
        uint64_t nth = 0;
        for (bool failed = true; failed;) {
            nth++;
            CHECK(nth < LOOP_MOST);
            fault_calls(SK_DISK_CALL_DIRECT, buffered ? 1 : 0, true, EINVAL);
            disk_scene s = disk_scene_open(LOOP_LIMIT);
            fault_calls(SK_DISK_CALL_ANY, nth, forever, error);
            (void)play(&s, memory);
            failed = sk_disk_fault_calls() >= nth; /* else there is no nth call */
            check_usable(&s);
            CHECK_EQUAL(0, disk_stats(&s).in_use_bytes);
            CHECK_EQUAL(0, play(&s, memory));
            disk_scene_close(&s);
        }
        CHECK(nth > 8);
    }
    free(memory);
}

SK_TEST(disk, test_open_when_each_call_fails_then_nothing_is_left) {
    char folder[FOLDER_CHARS];
    make_folder(folder);
    int nfiles = count_open_files();
    sk__disk *disk = NULL;
    fault_calls(SK_DISK_CALL_OPEN, 1, true, EOPNOTSUPP); /* and no file with a name, either */
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_open(folder, 0, &disk));
    CHECK_EQUAL(2, sk_disk_fault_calls());
    CHECK_CONTAINS(sk_error_text(), folder);
    fault_calls(SK_DISK_CALL_OPEN, 1, false, EACCES);
    CHECK_STATUS(SK_DISK_FAILED, sk__disk_open(folder, 0, &disk));
    CHECK_CONTAINS(sk_error_text(), strerror(EACCES));
    CHECK_EQUAL(1, sk_disk_fault_calls());
    CHECK(disk == NULL);
    fault_none();
    CHECK_EQUAL(nfiles, count_open_files());
    drop_folder(folder);
}

static void job_over(sk__disk_request *request, sk_status status) {
    job_note(request->context, status);
}

/* Write and wait, if it can be submitted; else done() is never called. */
static sk_status job_try(disk_scene *s, job *job, void *memory, size_t nbytes, sk__extent extent) {
    job->request = (sk__disk_request){.way = SK_DISK_WRITE,
                                      .memory = memory,
                                      .nbytes = nbytes,
                                      .extent = extent,
                                      .done = job_over,
                                      .context = job};
    sk_status status = sk__disk_submit(s->disk, &job->request);
    if (status == SK_OK) {
        CHECK_OK(job_wait(job));
    }
    CHECK_EQUAL(status == SK_OK, job->ndone);
    return status;
}

SK_TEST(disk, test_host_memory_when_each_allocation_fails_then_sound_and_usable) {
    char *memory = take_filled(LOOP_SIZE, 0);
    for (int mode = 0; mode < 4; mode++) {
        bool forever = mode % 2 == 1, is_named = mode >= 2;
        char folder[FOLDER_CHARS];
        make_folder(folder);
        uint64_t nth = 0;
        for (bool failed = true; failed;) {
            nth++;
            int nfiles = count_open_files();
            disk_scene s = {.nfiles = nfiles};
            sk__extent extents[2];
            fault_calls(SK_DISK_CALL_OPEN, is_named ? 1 : 0, false, EOPNOTSUPP);
            host_memory_fail(nth, forever);
            sk_status status = sk__disk_open(folder, 0, &s.disk);
            for (int i = 0; i < 2 && status == SK_OK; i++) {
                status = sk__disk_reserve(s.disk, BLOCK, &extents[i]);
            }
            job mine = {.ndone = 0};
            if (status == SK_OK) {
                status = job_try(&s, &mine, memory, BLOCK, extents[0]);
            }
            failed = host_memory_calls() >= nth;
            host_memory_fail(0, false);
            CHECK(status == SK_OK || (failed && status == SK_OUT_OF_HOST_MEMORY));
            if (s.disk != NULL) {
                check_usable(&s);
            }
            sk__disk_close(s.disk);
            CHECK_EQUAL(nfiles, count_open_files());
        }
        drop_folder(folder);
    }
    free(memory);
}
