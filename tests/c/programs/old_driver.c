/* old_driver.c - a driver library of CUDA 9.2, from before virtual memory; most of it is missing.
 */

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);

int cuInit(unsigned flags) {
    (void)flags;
    return 0;
}

int cuDriverGetVersion(int *version) {
    enum { VERSION = 9020 };
    *version = VERSION;
    return 0;
}
