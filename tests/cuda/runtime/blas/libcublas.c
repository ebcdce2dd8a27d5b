/* libcublas.c - cuBLAS on the virtual GPU: products take time and compute nothing.
 *
 * Here is what torch calls in training; everything else that the real library exports refuses and
 * says its name (generate_stubs.py). Arguments that only say where the bytes are have no names.
 */
#include <cublas_v2.h>
#include <stdlib.h>

#include "product.h"

struct handle {
    cudaStream_t stream;
    cublasPointerMode_t pointer_mode;
    cublasMath_t math_mode;
};

static struct handle *of(cublasHandle_t handle) { return (struct handle *)handle; }

cublasStatus_t cublasCreate_v2(cublasHandle_t *out) {
    *out = (cublasHandle_t)calloc(1, sizeof(struct handle));
    return *out == NULL ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    of(handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) {
    *stream = of(handle)->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t nbytes) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = of(handle)->pointer_mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    of(handle)->pointer_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = of(handle)->math_mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    of(handle)->math_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t queue(cublasHandle_t handle, struct product product) {
    product_queue(of(handle)->stream, &product);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *a, cudaDataType a_type, int lda, const void *b,
                            cudaDataType b_type, int ldb, const void *beta, void *c,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm) {
    return queue(handle, (struct product){m, n, k, 1, a_type, c_type});
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                          cublasOperation_t transb, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long a_stride, const void *b,
                                          cudaDataType b_type, int ldb, long long b_stride,
                                          const void *beta, void *c, cudaDataType c_type, int ldc,
                                          long long c_stride, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return queue(handle, (struct product){m, n, k, batch, a_type, c_type});
}

/* A product, batches of products, a product with a vector, of one type of numbers. */
#define PRODUCTS_OF(letter, type, kind)                                                            \
    cublasStatus_t cublas##letter##gemm_v2(                                                        \
        cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,   \
        int k, const type *alpha, const type *a, int lda, const type *b, int ldb,                  \
        const type *beta, type *c, int ldc) {                                                      \
        return queue(handle, (struct product){m, n, k, 1, kind, kind});                            \
    }                                                                                              \
    cublasStatus_t cublas##letter##gemmStridedBatched(                                             \
        cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,   \
        int k, const type *alpha, const type *a, int lda, long long a_stride, const type *b,       \
        int ldb, long long b_stride, const type *beta, type *c, int ldc, long long c_stride,       \
        int batch) {                                                                               \
        return queue(handle, (struct product){m, n, k, batch, kind, kind});                        \
    }                                                                                              \
    cublasStatus_t cublas##letter##gemv_v2(                                                        \
        cublasHandle_t handle, cublasOperation_t trans, int m, int n, const type *alpha,           \
        const type *a, int lda, const type *x, int incx, const type *beta, type *y, int incy) {    \
        return queue(handle, (struct product){m, 1, n, 1, kind, kind});                            \
    }                                                                                              \
    cublasStatus_t cublas##letter##dot_v2(cublasHandle_t handle, int n, const type *x, int incx,   \
                                          const type *y, int incy, type *result) {                 \
        return queue(handle, (struct product){1, 1, n, 1, kind, kind});                            \
    }

PRODUCTS_OF(S, float, CUDA_R_32F)
PRODUCTS_OF(D, double, CUDA_R_64F)

cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void *x, cudaDataType x_type,
                           int incx, const void *y, cudaDataType y_type, int incy, void *result,
                           cudaDataType result_type, cudaDataType execution_type) {
    return queue(handle, (struct product){1, 1, n, 1, x_type, result_type});
}
