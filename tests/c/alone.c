/* alone.c - see alone.h. */
#include "alone.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

void run_alone(const char *name, const char *variable, const char *value, int expected) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        char *const arguments[] = {"run", (char *)(uintptr_t)name, NULL};
        (void)unsetenv("SK_TEST_DEVICE");
        (void)setenv("SK_TEST_ALONE", "1", 1);
        (void)setenv(variable, value, 1);
        (void)execv("/proc/self/exe", arguments);
        _exit(1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(expected, WEXITSTATUS(status));
}
