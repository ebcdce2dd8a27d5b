/* test_disk_file.c - the disk's file: without a name, gone with the process, the parent's alone. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disk/handle.h"
#include "disk_fixture.h"

SK_TEST(disk, test_open_when_done_then_the_file_has_no_name_and_is_private) {
    static const int errors[] = {0, EOPNOTSUPP, EISDIR, EINVAL}; /* no file without a name */
    for (int i = 0; i < 4; i++) {
        fault_calls(SK_DISK_CALL_OPEN, errors[i] == 0 ? 0 : 1, false, errors[i]);
        disk_scene s = disk_scene_open(0); /* looks into the folder */
        CHECK_EQUAL(errors[i] == 0 ? 1 : 2, sk_disk_fault_calls());
        struct stat about;
        CHECK(fstat(s.disk->file.fd, &about) == 0);
        CHECK_EQUAL(0600, about.st_mode & 07777);
        CHECK_EQUAL(0, about.st_nlink);
        CHECK((fcntl(s.disk->file.fd, F_GETFD) & FD_CLOEXEC) != 0);
        check_usable(&s);
        disk_scene_close(&s);
    }
}

SK_TEST(disk, test_folder_when_the_process_is_killed_then_nothing_is_left) {
    char folder[FOLDER_CHARS];
    make_folder(folder);
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        sk__disk *disk = NULL;
        sk__extent extent;
        bool works = sk__disk_open(folder, 0, &disk) == SK_OK &&
                     sk__disk_reserve(disk, MIB, &extent) == SK_OK;
        (void)!write(ready[1], works ? "1" : "0", 1);
        for (;;) {
            (void)pause();
        }
    }
    char byte = 0;
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    CHECK_EQUAL('1', byte);
    (void)close(ready[0]);
    (void)close(ready[1]);
    drop_folder(folder);
}

static void never_done(sk__disk_request *request, sk_status status) {
    (void)status;
    *(int *)request->context += 1;
}

enum { NJOBS = 8 };

static int use_in_child(disk_scene *s, void *argument) {
    const sk__extent *extent = argument;
    sk__extent another;
    EXPECT(sk__disk_reserve(s->disk, BLOCK, &another) == SK_UNSUPPORTED);
    EXPECT(strstr(sk_error_text(), "forked child") != NULL);
    char memory[8] = "parent";
    int ndone = 0;
    sk__disk_request request = {.way = SK_DISK_WRITE,
                                .memory = memory,
                                .nbytes = sizeof memory,
                                .extent = *extent,
                                .done = never_done,
                                .context = &ndone};
    EXPECT(sk__disk_submit(s->disk, &request) == SK_UNSUPPORTED);
    EXPECT(strstr(sk_error_text(), "forked child") != NULL);
    EXPECT(sk__disk_trim(s->disk) == SK_UNSUPPORTED);
    for (int i = 0; i <= NJOBS; i++) { /* also those that the parent has requests for */
        sk__disk_release(s->disk, extent[i]);
    }
    EXPECT(sk__disk_check(s->disk) == SK_OK);
    sk__disk_stats stats;
    sk__disk_stats_get(s->disk, &stats);
    EXPECT(stats.in_use_bytes == 0);
    EXPECT(ndone == 0);
    EXPECT(count_open_files() == s->nfiles); /* the file is let go of at once */
    sk__disk_close(s->disk);
    EXPECT(count_open_files() == s->nfiles);
#ifndef SK_TEST_SANITISED /* which do not survive threads started after a fork of busy ones */
    sk__disk *own = NULL; /* a disk of its own it may have */
    EXPECT(sk__disk_open(s->folder, 0, &own) == SK_OK);
    s->disk = own;
    check_usable(s);
    sk__disk_close(own);
#endif
    return 0;
}

SK_TEST(disk, test_fork_when_requests_are_under_way_then_only_the_parent_moves_them) {
    enum { SIZE = SK_PIECE_BYTES + BLOCK };
    disk_scene s = disk_scene_open(0);
    char *memory = take_filled(SIZE, 3);
    sk__extent extents[NJOBS + 1];
    job jobs[NJOBS];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < NJOBS; i++) {
            extents[i] = disk_reserve(&s, SIZE);
            job_submit(&s, &jobs[i], SK_DISK_WRITE, memory, SIZE, extents[i]);
        }
        extents[NJOBS] = disk_reserve(&s, MIB);
        disk_in_child(use_in_child, &s, extents);
        for (int i = 0; i < NJOBS; i++) {
            CHECK_OK(job_wait(&jobs[i]));
        }
        char *back = take_filled(SIZE, 0);
        for (int i = 0; i < NJOBS; i++) {
            CHECK_OK(disk_move(&s, SK_DISK_READ, back, SIZE, extents[i]));
            CHECK(bytes_hold(back, SIZE, 3));
            sk__disk_release(s.disk, extents[i]);
        }
        sk__disk_release(s.disk, extents[NJOBS]);
        free(back);
    }
    free(memory);
    disk_scene_close(&s);
}
