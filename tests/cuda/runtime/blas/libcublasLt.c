/* libcublasLt.c - cuBLASLt on the virtual GPU: see libcublas.c. A description of a product or of a
 * preference is only a handle; a layout is what says how large a product is. */
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#include "product.h"

struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int32_t batch;
};

static cublasStatus_t handle_make(void *out, size_t nbytes) {
    void *made = calloc(1, nbytes);
    memcpy(out, &made, sizeof made);
    return made == NULL ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t handle_free(void *handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
    cublasStatus_t status = handle_make(out, sizeof(struct layout));
    if (status == CUBLAS_STATUS_SUCCESS) {
        *(struct layout *)*out =
            (struct layout){.type = type, .rows = rows, .columns = columns, .batch = 1};
    }
    return status;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t nbytes) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && nbytes >= sizeof(int32_t)) {
        memcpy(&((struct layout *)layout)->batch, value, sizeof(int32_t));
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return handle_free(layout);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType scale) {
    return handle_make(out, sizeof(struct layout));
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t nbytes) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    return handle_free(description);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    return handle_make(out, sizeof(struct layout));
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t nbytes) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return handle_free(preference);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *found) {
    memset(results, 0, (size_t)wanted * sizeof results[0]);
    *found = wanted > 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                              const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t nbytes,
                              cudaStream_t stream) {
    const struct layout *left = (const struct layout *)a_layout;
    const struct layout *result = (const struct layout *)d_layout;
    double m = (double)result->rows;
    struct product product = {
        .m = m,
        .n = (double)result->columns,
        .k = (double)left->rows * (double)left->columns / m, /* whichever way it lies */
        .batch = result->batch,
        .in = left->type,
        .out = result->type,
    };
    product_queue(stream, &product);
    return CUBLAS_STATUS_SUCCESS;
}
