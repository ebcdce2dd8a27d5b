/* test_cuda_open.c - without a driver, with an old one, and without a device. */
#include <stdlib.h>

#include "alone.h"
#include "backend/cuda_driver.h"
#include "cuda_device.h"
#include "fixture.h"

/* ---- libraries ------------------------------------------------------------------------------- */

SK_TEST(cuda_driver, test_open_when_there_is_no_library_then_the_text_says_what_was_looked_for) {
    sk__cuda_driver driver;
    CHECK_STATUS(SK_UNSUPPORTED, sk__cuda_driver_open("/nowhere/libcuda.so.1", &driver));
    CHECK_CONTAINS(sk_error_text(), "no NVIDIA driver found: tried /nowhere/libcuda.so.1");
    CHECK_CONTAINS(sk_error_text(), "SWAPKIT_CUDA_DRIVER");
}

SK_TEST(cuda_driver, test_open_when_the_library_is_another_then_unsupported) {
    sk__cuda_driver driver;
    CHECK_STATUS(SK_UNSUPPORTED, sk__cuda_driver_open("libm.so.6", &driver));
    CHECK_CONTAINS(sk_error_text(), "libm.so.6, of unknown version, has no cuInit");
}

SK_TEST(cuda_driver, test_open_when_the_driver_is_old_then_its_version_and_the_symbol_are_told) {
    const char *path = getenv("SK_TEST_OLD_DRIVER");
    if (path == NULL) {
        test_skip("SK_TEST_OLD_DRIVER names no library");
    }
    sk__cuda_driver driver;
    CHECK_STATUS(SK_UNSUPPORTED, sk__cuda_driver_open(path, &driver));
    CHECK_CONTAINS(sk_error_text(), "for CUDA 9.2, has no cuGetErrorName: install a newer driver");
}

/* ---- processes of their own ------------------------------------------------------------------ */

SK_TEST(cuda_process, test_library_when_missing_then_opening_says_so) {
    run_alone("cuda_alone.test_no_library", "SWAPKIT_CUDA_DRIVER", "/nowhere/libcuda.so.1", 0);
}

SK_TEST(cuda_alone, test_no_library) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = -1;
    for (int again = 0; again < 2; again++) {
        CHECK_STATUS(SK_UNSUPPORTED, sk_backend_cuda(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), "tried /nowhere/libcuda.so.1");
        CHECK_STATUS(SK_UNSUPPORTED, sk_cuda_device_count(&count));
    }
    CHECK(backend == NULL);
    CHECK_EQUAL(-1, count);
}

SK_TEST(cuda_process, test_device_when_there_is_none_then_opening_says_so) {
    if (!device_is_cuda()) {
        test_skip("needs the simulated driver: SK_TEST_DEVICE=cuda");
    }
    (void)cusim();
    run_alone("cuda_alone.test_no_device", "CUSIM_DEVICES", "0", 0);
}

SK_TEST(cuda_alone, test_no_device) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    CHECK_STATUS(SK_UNSUPPORTED, sk_backend_cuda(&params, &backend));
    CHECK_CONTAINS(sk_error_text(), "cuInit failed: CUDA_ERROR_NO_DEVICE (100)");
}
