/* test_sched_files.c - copies that are parts of files of others: compared, read again, never
 * trusted.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "instruments/instruments.h"
#include "sched_fixture.h"

enum { SIZE = 300 * KIB + 4, BEGIN = 1000, NFIT = 4, LIMIT = NFIT * SIZE + 64 * KIB, MANY = 9 };

/* A file with the bytes of several storages, after a header. */
typedef struct shelf {
    char folder[FOLDER_CHARS];
    char path[FOLDER_CHARS + 8];
    char *bytes; /* of the storages */
    int count;
} shelf;

/* Write the file; `change`: one bit of each storage. */
static void shelf_write(const shelf *f, bool change) {
    int fd = open(f->path, O_WRONLY | O_CREAT, 0600);
    CHECK(fd >= 0);
    CHECK_EQUAL(f->count * SIZE, pwrite(fd, f->bytes, (size_t)f->count * SIZE, BEGIN));
    for (int i = 0; change && i < f->count; i++) {
        char last = (char)(f->bytes[(size_t)(i + 1) * SIZE - 1] ^ 1);
        CHECK_EQUAL(1, pwrite(fd, &last, 1, BEGIN + (off_t)(i + 1) * SIZE - 1));
    }
    CHECK(close(fd) == 0);
}

static shelf shelf_open(scene *s, parcel *parcels, int count) {
    shelf f = {.count = count, .bytes = calloc((size_t)count, SIZE)};
    CHECK(f.bytes != NULL);
    make_folder(f.folder);
    (void)snprintf(f.path, sizeof f.path, "%s/file", f.folder);
    for (int i = 0; i < count; i++) {
        parcels[i] = parcel_make(s, SIZE, SK_TIER_ANY, (uint64_t)(count - i));
        device_read(f.bytes + (size_t)i * SIZE, parcels[i].device->bytes, SIZE);
    }
    shelf_write(&f, false);
    return f;
}

static void borrow_many(const shelf *f, const parcel *parcels) {
    for (int i = 0; i < f->count; i++) {
        CHECK_OK(sk_group_borrow(parcels[i].group, f->path, BEGIN + (uint64_t)i * SIZE));
    }
}

static void shelf_close(shelf *f, parcel *parcels) {
    for (int i = 0; i < f->count; i++) {
        parcel_drop(&parcels[i]);
    }
    (void)unlink(f->path);
    drop_folder(f->folder);
    free(f->bytes);
}

static void send_many(scene *s, parcel *parcels, int count) {
    for (int i = 0; i < count; i++) {
        parcel_send(&parcels[i]);
        scene_check(s);
    }
    sk_sched_drain(s->sched);
}

static void await_compared(scene *s) {
    for (sk_sched_stats stats = scene_stats(s); s->sched->nwrites > 0; stats = scene_stats(s)) {
        CHECK(stats.groups > 0);
        (void)usleep(1000);
    }
}

static void open_small(scene *s, bool disk) {
    scene_open(s, &(scene_options){.host_limit_bytes = disk ? 2 * LIMIT : LIMIT, .disk = disk});
}

SK_TEST(sched_files, test_copies_when_in_a_file_then_few_are_on_the_host_and_none_is_written) {
    scene s;
    open_small(&s, false);
    parcel parcels[MANY];
    shelf f = shelf_open(&s, parcels, MANY);
    int nfiles = count_open_files();
    borrow_many(&f, parcels);
    CHECK_EQUAL(nfiles + 1, count_open_files()); /* they share it */
    for (int round = 0; round < 2; round++) {
        send_many(&s, parcels, MANY);
        CHECK(scene_stats(&s).host_bytes <= LIMIT);
        for (int i = MANY - 1; i >= 0; i--) {
            parcel_fetch(&parcels[i]);
            scene_check(&s);
        }
        for (int i = 0; i < MANY && round == 0; i++) {
            parcel_evict(&parcels[i]);
            parcel_fetch(&parcels[i]);
            sk_group_destroy(parcels[i].group);
            CHECK_OK(sk_group_create(s.sched, SIZE, SK_TIER_ANY, &parcels[i].group));
            CHECK_OK(sk_group_borrow(parcels[i].group, f.path, BEGIN + (uint64_t)i * SIZE));
        }
    }
    sk_sched_stats stats = scene_stats(&s);
    CHECK(stats.read_bytes >= (uint64_t)(MANY - NFIT) * SIZE);
    CHECK(stats.host_peak_bytes <= LIMIT);
    CHECK_EQUAL(0, stats.written_bytes + stats.disk_peak_bytes);
    shelf_close(&f, parcels);
    CHECK_EQUAL(nfiles, count_open_files());
    scene_close(&s);
}

SK_TEST(sched_files, test_file_when_renamed_or_deleted_then_its_bytes_are_still_read) {
    scene s;
    open_small(&s, false);
    parcel parcels[MANY];
    shelf f = shelf_open(&s, parcels, MANY);
    borrow_many(&f, parcels);
    CHECK(unlink(f.path) == 0);
    shelf_write(&f, true); /* another one at its path */
    parcel other = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(sk_group_borrow(other.group, f.path, BEGIN));
    send_many(&s, parcels, MANY);
    for (int i = 0; i < MANY; i++) {
        parcel_fetch(&parcels[i]);
    }
    shelf_close(&f, parcels);
    parcel_drop(&other);
    scene_close(&s);
}

SK_TEST(sched_files, test_file_when_it_has_other_bytes_then_the_copy_is_kept_or_written) {
    for (int disk = 0; disk < 2; disk++) {
        scene s;
        open_small(&s, disk != 0);
        parcel parcels[MANY];
        shelf f = shelf_open(&s, parcels, MANY);
        borrow_many(&f, parcels);
        shelf_write(&f, true);
        int count = disk != 0 ? MANY : NFIT;
        send_many(&s, parcels, count);
        if (disk == 0) {
            await_compared(&s);
            CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&parcels[NFIT], NULL));
            CHECK_CONTAINS(sk_error_text(), "no disk was given");
        } else {
            CHECK(scene_stats(&s).written_bytes > 0);
        }
        for (int i = 0; i < count; i++) {
            parcel_fetch(&parcels[i]);
        }
        shelf_close(&f, parcels);
        scene_close(&s);
    }
}

static void read_changed(void (*change)(const shelf *f), const char *why) {
    scene s;
    open_small(&s, false);
    parcel parcels[MANY];
    shelf f = shelf_open(&s, parcels, MANY);
    borrow_many(&f, parcels);
    send_many(&s, parcels, MANY);
    await_compared(&s);
    change(&f);
    int nlost = 0;
    for (int i = 0; i < MANY; i++) {
        sk_status status = parcel_in(&parcels[i], NULL);
        CHECK_OK(status);
        status = sk_group_finish_in(parcels[i].group, NULL, false);
        if (status != SK_OK) {
            CHECK_STATUS(SK_DISK_FAILED, status);
            CHECK_CONTAINS(sk_error_text(), f.path);
            CHECK_CONTAINS(sk_error_text(), why);
            nlost++;
        }
        scene_check(&s);
    }
    CHECK(nlost >= MANY - NFIT);
    shelf_write(&f, false); /* as it was */
    for (int i = 0; i < MANY; i++) {
        parcel_recover(&parcels[i]);
    }
    shelf_close(&f, parcels);
    scene_close(&s);
}

static void change_bits(const shelf *f) { shelf_write(f, true); }

static void shorten(const shelf *f) { CHECK(truncate(f->path, BEGIN + 10) == 0); }

SK_TEST(sched_files, test_file_when_changed_later_then_reading_fails_until_it_is_as_it_was) {
    read_changed(change_bits, "has been changed since it was loaded");
    read_changed(shorten, "has become shorter");
}

SK_TEST(sched_files, test_file_when_reading_fails_then_the_copy_is_kept_and_compared_later) {
    scene s;
    open_small(&s, false);
    parcel parcels[MANY];
    shelf f = shelf_open(&s, parcels, MANY);
    borrow_many(&f, parcels);
    fault_calls(SK_DISK_CALL_READ, 1, true, EIO);
    for (int i = 0; i < NFIT; i++) {
        parcel_send(&parcels[i]);
    }
    sk_sched_drain(s.sched);
    await_compared(&s);
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&parcels[NFIT]));
    fault_calls(SK_DISK_CALL_READ, 1, false, EINTR);
    send_many(&s, parcels + NFIT, MANY - NFIT);
    fault_short(SK_DISK_CALL_READ, 1, true, KIB);
    for (int i = 0; i < MANY; i++) {
        parcel_fetch(&parcels[i]);
    }
    fault_none();
    shelf_close(&f, parcels);
    scene_close(&s);
}

SK_TEST(sched_files, test_borrow_when_the_file_is_of_no_use_then_refused_and_nothing_has_changed) {
    scene s;
    open_small(&s, false);
    parcel p;
    shelf f = shelf_open(&s, &p, 1);
    int nfiles = count_open_files();
    CHECK_STATUS(SK_INVALID, sk_group_borrow(p.group, f.folder, 0));
    CHECK_STATUS(SK_INVALID, sk_group_borrow(p.group, f.path, BEGIN + 1));
    host_memory_fail(1, false);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, sk_group_borrow(p.group, f.path, BEGIN));
    host_memory_fail(0, false);
    CHECK(unlink(f.path) == 0);
    CHECK_STATUS(SK_DISK_FAILED, sk_group_borrow(p.group, f.path, BEGIN));
    CHECK_CONTAINS(sk_error_text(), strerror(ENOENT));
    CHECK_EQUAL(nfiles, count_open_files());
    parcel_send(&p);
    CHECK_STATUS(SK_INVALID, sk_group_borrow(p.group, f.path, BEGIN));
    parcel_fetch(&p);
    shelf_close(&f, &p);
    scene_close(&s);
}

SK_TEST(sched_files, test_disk_when_closed_with_parts_of_files_then_no_file_stays_open) {
    int nfiles = count_open_files();
    sk__disk *disk = NULL;
    CHECK_OK(sk__disk_open(NULL, 0, &disk));
    sk__extent extents[3];
    for (int i = 0; i < 3; i++) {
        const char *path = i == 0 ? "/proc/self/exe" : "/etc/passwd";
        CHECK_OK(sk__disk_borrow(disk, path, 1, 10, &extents[i]));
    }
    CHECK_EQUAL(nfiles + 2, count_open_files());
    CHECK_STATUS(SK_OUT_OF_DISK, sk__disk_reserve(disk, 1, &extents[1]));
    sk__disk_release(disk, extents[0]);
    CHECK_OK(sk__disk_trim(disk));
    CHECK_OK(sk__disk_check(disk));
    sk__disk_close(disk);
    CHECK_EQUAL(nfiles, count_open_files());
}
