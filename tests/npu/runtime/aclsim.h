/* aclsim.h - what tests can ask of the simulated ACL runtime beside ACL's own functions.
 *
 * Everything in driver/cusim.h works, too: a stream is a CUstream, an event a CUevent, memory is
 * the driver's. dlsym() on the library's handle finds both. Threads: any.
 */
#ifndef ACLSIM_H
#define ACLSIM_H

#include <stdbool.h>
#include <stdint.h>

#define ACLSIM_API __attribute__((visibility("default")))

/* Let the nth coming call of a function of ACL return `error` and do nothing; 1 is the next, 0
 * every one. "*" means any function. 0 takes it back. False: no such function. */
ACLSIM_API bool aclsim_fail(const char *function, unsigned nth, int error);
/* How often a function of ACL was called; "*": all. */
ACLSIM_API uint64_t aclsim_calls(const char *function);
/* Take failures back and set the counts to 0. */
ACLSIM_API void aclsim_reset(void);
/* The policy (aclrtMemMallocPolicy) that the allocation at `address` was made with; -1: none. */
ACLSIM_API int aclsim_policy(const void *address);
/* The attribute (aclrtMemAttr) of the physical memory mapped at `address`; -1: none. */
ACLSIM_API int aclsim_memory_attribute(const void *address);

#endif
