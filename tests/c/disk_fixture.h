/* disk_fixture.h - a disk in a folder of its own, and requests that are waited for. */
#ifndef SWAPKIT_TESTS_DISK_FIXTURE_H
#define SWAPKIT_TESTS_DISK_FIXTURE_H

#include "disk/disk.h"
#include "fixture.h"

enum { BLOCK = 4096, FOLDER_CHARS = 64 };

typedef struct disk_scene {
    char folder[FOLDER_CHARS];
    int nfiles; /* that this process had open before */
    sk__disk *disk;
} disk_scene;

disk_scene disk_scene_open(size_t limit_bytes);
/* Checks the disk's structures, that the folder is empty and that no file stays open. */
void disk_scene_close(disk_scene *scene);

/* An empty folder, on a real file system where there is one; and its end, if it still is empty. */
void make_folder(char *out);
void drop_folder(const char *folder);
int count_open_files(void);

/* One request and how it ended. */
typedef struct job {
    sk__disk_request request;
    sk_status status;
    int ndone;
} job;

void job_submit(disk_scene *scene, job *job, sk__disk_way way, void *memory, size_t nbytes,
                sk__extent extent);
sk_status job_wait(job *job);
/* What a test's own done() has to say, if it has one. */
void job_note(job *job, sk_status status);

/* Submit and wait; on failure sk_error_text() has the request's text. */
sk_status disk_move(disk_scene *scene, sk__disk_way way, void *memory, size_t nbytes,
                    sk__extent extent);
sk__extent disk_reserve(disk_scene *scene, size_t nbytes);
sk__disk_stats disk_stats(disk_scene *scene);

/* Arm a fault of one kind of call; and none. */
void fault_calls(unsigned calls, uint64_t nth, bool forever, int error);
void fault_short(unsigned calls, uint64_t nth, bool forever, size_t short_bytes);
void fault_none(void);

/* Every byte, unlike pattern_write(). */
void bytes_write(void *memory, size_t nbytes, unsigned seed);
bool bytes_hold(const void *memory, size_t nbytes, unsigned seed);

void *take_memory(size_t nbytes); /* free(); aligned for direct I/O */
char *take_filled(size_t nbytes, unsigned seed);
/* Disarm faults and see that the disk still does what it is for. */
void check_usable(disk_scene *scene);

/* Run `child` in a fork; it returns 0, or the line of what went wrong. */
void disk_in_child(int (*child)(disk_scene *scene, void *argument), disk_scene *scene,
                   void *argument);

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return __LINE__;                                                                       \
        }                                                                                          \
    } while (0)

#endif
