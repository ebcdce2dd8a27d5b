/* device.h - the device that the tests run on, and its memory from the host's side.
 *
 * SK_TEST_DEVICE=cuda in the environment: an NVIDIA device, or the simulated driver that
 * SWAPKIT_CUDA_DRIVER names. SK_TEST_DEVICE=ascend: the simulated ACL runtime that
 * SWAPKIT_ASCEND_RUNTIME names, which is the same driver underneath. The host then cannot touch
 * device memory. Else the cpu backend. What is here works on all of them, and takes host memory
 * where device memory is expected.
 */
#ifndef SWAPKIT_TESTS_DEVICE_H
#define SWAPKIT_TESTS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "swapkit_devices.h"

bool device_is_cuda(void);
bool device_is_ascend(void);
bool device_is_remote(void); /* either: the host cannot touch its memory */

/* A device of its own, of which `capacity_bytes` can be had. Blocks have no room to be read past,
 * so that sizes are the same on all devices. */
sk_backend *make_device(size_t capacity_bytes);
sk_backend *make_whole_device(size_t capacity_bytes); /* without virtual memory, where possible */

/* `inner`, transferred, of which `capacity_bytes` can be had: memory that is mapped at several
 * addresses counts once, and until the last of them is decommitted. */
sk_backend *make_capped(sk_backend *inner, size_t capacity_bytes);
/* make_device() whose memory can be mapped at several addresses, which the CPU's cannot. */
sk_backend *make_aliasing(size_t capacity_bytes);

/* Device memory that belongs to no pool of a test and that no work is queued on. */
void *device_take(size_t nbytes);
void device_give(void *address, size_t nbytes);

/* Host memory, zero, that asynchronous copies of the device do not wait for: page-locked. */
void *host_take(size_t nbytes);
void host_give(void *address);

/* In the host's order and that of the NULL stream; memory of either kind on both sides. */
void device_read(void *to, const void *from, size_t nbytes);
void device_write(void *to, const void *from, size_t nbytes);
void device_fill(void *to, unsigned char value, size_t nbytes);

/* For the rest of the test, a simulated device does not overwrite memory that comes and goes: that
 * takes most of the time where much of it is never looked at. */
void device_wipe_not(void);

/* Let a stream of a simulated device be busy for this long; skips the test elsewhere. */
void device_slow(sk_stream *stream, uint64_t nanoseconds);

/* A device as it is, in granules of 64 KiB if it can. make_remote(): of the kind that tests run on,
 * which the host cannot touch. */
sk_backend *make_remote(int32_t device, bool whole);
sk_backend *make_cuda(int32_t device, bool whole);
sk_backend *make_ascend(int32_t device, bool whole);
/* Skip the test unless it can. */
void need_small_granules(void);
/* Skip the test unless work on the NULL stream is done when the call returns. */
void need_host_order(void);

/* Before and after every test: what one has broken does not stay so, and what it has left open is
 * found (a text, NULL: nothing). */
void device_test_begin(void);
const char *device_test_end(void);

/* Whether this test cannot be run on the device: the reason, or NULL. */
const char *device_unfit(const char *subject);

#endif
