/* disk_fixture.c - see disk_fixture.h. */
#include "disk_fixture.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"

enum { CHILD_SECONDS = 30 };

static pthread_mutex_t job_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_changed = PTHREAD_COND_INITIALIZER;

static int count_entries(const char *folder) {
    DIR *list = opendir(folder);
    CHECK(list != NULL);
    int count = 0;
    for (const struct dirent *entry = readdir(list); entry != NULL; entry = readdir(list)) {
        count += entry->d_name[0] != '.';
    }
    (void)closedir(list);
    return count;
}

int count_open_files(void) { return count_entries("/proc/self/fd"); }

void make_folder(char *out) {
    const char *base = getenv("TMPDIR");
    (void)snprintf(out, FOLDER_CHARS, "%.40s/swapkit-XXXXXX", base == NULL ? "/tmp" : base);
    CHECK(mkdtemp(out) != NULL);
}

void drop_folder(const char *folder) {
    CHECK_EQUAL(0, count_entries(folder));
    CHECK(rmdir(folder) == 0);
}

disk_scene disk_scene_open(size_t limit_bytes) {
    disk_scene made = {.nfiles = count_open_files()};
    make_folder(made.folder);
    CHECK_OK(sk__disk_open(made.folder, limit_bytes, &made.disk));
    CHECK_EQUAL(made.nfiles + 1, count_open_files());
    CHECK_EQUAL(0, count_entries(made.folder));
    return made;
}

void disk_scene_close(disk_scene *scene) {
    CHECK_OK(sk__disk_check(scene->disk));
    sk__disk_close(scene->disk);
    CHECK_EQUAL(scene->nfiles, count_open_files());
    drop_folder(scene->folder);
}

void job_note(job *job, sk_status status) {
    (void)pthread_mutex_lock(&job_lock);
    job->status = status;
    job->ndone++;
    (void)pthread_cond_broadcast(&job_changed);
    (void)pthread_mutex_unlock(&job_lock);
}

static void job_done(sk__disk_request *request, sk_status status) {
    job_note(request->context, status);
}

void job_submit(disk_scene *scene, job *job, sk__disk_way way, void *memory, size_t nbytes,
                sk__extent extent) {
    job->ndone = 0;
    job->request = (sk__disk_request){.way = way,
                                      .memory = memory,
                                      .nbytes = nbytes,
                                      .extent = extent,
                                      .done = job_done,
                                      .context = job};
    CHECK_OK(sk__disk_submit(scene->disk, &job->request));
}

sk_status job_wait(job *job) {
    (void)pthread_mutex_lock(&job_lock);
    while (job->ndone == 0) {
        (void)pthread_cond_wait(&job_changed, &job_lock);
    }
    sk_status status = job->status;
    (void)pthread_mutex_unlock(&job_lock);
    return status;
}

sk_status disk_move(disk_scene *scene, sk__disk_way way, void *memory, size_t nbytes,
                    sk__extent extent) {
    job mine;
    job_submit(scene, &mine, way, memory, nbytes, extent);
    sk_status status = job_wait(&mine);
    return status == SK_OK ? SK_OK : sk__fail(status, "%s", mine.request.text);
}

sk__extent disk_reserve(disk_scene *scene, size_t nbytes) {
    sk__extent extent = {0};
    CHECK_OK(sk__disk_reserve(scene->disk, nbytes, &extent));
    CHECK(extent.nbytes >= nbytes && extent.nbytes < nbytes + sk__disk_alignment(scene->disk));
    return extent;
}

sk__disk_stats disk_stats(disk_scene *scene) {
    sk__disk_stats stats;
    sk__disk_stats_get(scene->disk, &stats);
    return stats;
}

void fault_calls(unsigned calls, uint64_t nth, bool forever, int error) {
    sk_disk_fault_arm(calls, nth, forever, error, 0);
}

void fault_short(unsigned calls, uint64_t nth, bool forever, size_t short_bytes) {
    sk_disk_fault_arm(calls, nth, forever, 0, short_bytes);
}

void fault_none(void) { fault_calls(SK_DISK_CALL_ANY, 0, false, 0); }

static unsigned char byte_of(size_t i, unsigned seed) {
    enum { MIX = 167, SHIFT = 12 };
    return (unsigned char)(i + (i >> SHIFT) * MIX + seed);
}

void bytes_write(void *memory, size_t nbytes, unsigned seed) {
    unsigned char *bytes = memory;
    for (size_t i = 0; i < nbytes; i++) {
        bytes[i] = byte_of(i, seed);
    }
}

bool bytes_hold(const void *memory, size_t nbytes, unsigned seed) {
    const unsigned char *bytes = memory;
    size_t i = 0;
    while (i < nbytes && bytes[i] == byte_of(i, seed)) {
        i++;
    }
    return i == nbytes;
}

void *take_memory(size_t nbytes) {
    void *memory = aligned_alloc(BLOCK, sk__round_up(nbytes, BLOCK));
    CHECK(memory != NULL);
    return memory;
}

char *take_filled(size_t nbytes, unsigned seed) {
    char *memory = take_memory(nbytes);
    bytes_write(memory, nbytes, seed);
    return memory;
}

void check_usable(disk_scene *s) {
    fault_none();
    CHECK_OK(sk__disk_check(s->disk));
    enum { SIZE = 3 * BLOCK + 5 };
    char *memory = take_filled(SIZE, 77);
    sk__extent extent = disk_reserve(s, SIZE);
    CHECK_OK(disk_move(s, SK_DISK_WRITE, memory, SIZE, extent));
    memset(memory, 0, SIZE);
    CHECK_OK(disk_move(s, SK_DISK_READ, memory, SIZE, extent));
    CHECK(bytes_hold(memory, SIZE, 77));
    sk__disk_release(s->disk, extent);
    free(memory);
}

void disk_in_child(int (*child)(disk_scene *scene, void *argument), disk_scene *scene,
                   void *argument) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(CHILD_SECONDS);
        int line = child(scene, argument);
        coverage_write();
        _exit(line == 0 ? 0 : line % 255 + 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM); /* hung */
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(0, WEXITSTATUS(status));
}
