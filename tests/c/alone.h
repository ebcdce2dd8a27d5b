/* alone.h - tests in processes of their own.
 *
 * What can be done once per process only, such as finding no driver or ending it for good, is
 * tested there: tests of a subject "..._alone" run only where SK_TEST_ALONE is set, and are started
 * by others. */
#ifndef SWAPKIT_TESTS_ALONE_H
#define SWAPKIT_TESTS_ALONE_H

/* Run the test `name` in a new process, for which `variable` is set; without SK_TEST_DEVICE, unless
 * that is the variable. It must end with the status `expected`. */
void run_alone(const char *name, const char *variable, const char *value, int expected);

#endif
