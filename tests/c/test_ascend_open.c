/* test_ascend_open.c - without a runtime, with an old one, and without a device. */
#include <stdlib.h>

#include "alone.h"
#include "backend/ascend_runtime.h"
#include "cuda_device.h"
#include "fixture.h"

/* ---- libraries ------------------------------------------------------------------------------- */

SK_TEST(ascend_runtime, test_open_when_there_is_no_library_then_the_text_says_what_was_looked_for) {
    sk__ascend_runtime runtime;
    CHECK_STATUS(SK_UNSUPPORTED, sk__ascend_runtime_open("/nowhere/libascendcl.so", &runtime));
    CHECK_CONTAINS(sk_error_text(), "ascend backend: no CANN runtime found: tried "
                                    "/nowhere/libascendcl.so");
    CHECK_CONTAINS(sk_error_text(), "set SWAPKIT_ASCEND_RUNTIME to use another library");
}

SK_TEST(ascend_runtime, test_open_when_the_library_is_another_then_the_symbol_is_told) {
    sk__ascend_runtime runtime;
    CHECK_STATUS(SK_UNSUPPORTED, sk__ascend_runtime_open("libm.so.6", &runtime));
    CHECK_CONTAINS(sk_error_text(),
                   "the runtime library libm.so.6 has no aclInit: install a newer CANN");
}

/* ---- processes of their own ------------------------------------------------------------------ */

SK_TEST(ascend_process, test_library_when_missing_then_opening_says_so) {
    run_alone("ascend_alone.test_no_library", "SWAPKIT_ASCEND_RUNTIME", "/nowhere/libascendcl.so",
              0);
}

SK_TEST(ascend_alone, test_no_library) {
    sk_ascend_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = -1;
    for (int again = 0; again < 2; again++) {
        CHECK_STATUS(SK_UNSUPPORTED, sk_backend_ascend(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), "tried /nowhere/libascendcl.so");
        CHECK_STATUS(SK_UNSUPPORTED, sk_ascend_device_count(&count));
    }
    CHECK(backend == NULL);
    CHECK_EQUAL(-1, count);
}

SK_TEST(ascend_process, test_device_when_there_is_none_then_opening_says_so) {
    if (!device_is_ascend()) {
        test_skip("needs the simulated runtime: SK_TEST_DEVICE=ascend");
    }
    run_alone("ascend_alone.test_no_device", "CUSIM_DEVICES", "0", 0);
}

SK_TEST(ascend_alone, test_no_device) {
    sk_ascend_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = -1;
    CHECK_STATUS(SK_UNSUPPORTED, sk_backend_ascend(&params, &backend));
    CHECK_CONTAINS(sk_error_text(), "ascend backend: the runtime has found no device");
    CHECK_OK(sk_ascend_device_count(&count));
    CHECK_EQUAL(0, count);
}
