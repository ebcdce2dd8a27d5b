/* acl_harness.h - tests of the simulated ACL runtime, in the harness of the driver's. */
#ifndef ACLSIM_HARNESS_H
#define ACLSIM_HARNESS_H

#include "acl_abi.h"
#include "aclsim.h"
#include "harness.h"

/* Set device 0 of a machine with the default options, which `change` (or NULL) may alter.
 * close_acl() resets it, and takes failures back. */
void open_acl(void (*change)(cusim_options *));
void close_acl(void);
void with_two_devices(cusim_options *options);

void *alloc_acl(size_t size); /* without padding */
aclrtStream stream_acl(void);

#endif
