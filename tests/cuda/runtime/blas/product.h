/* product.h - what a product of matrices takes on the virtual GPU. */
#ifndef SIMULATED_PRODUCT_H
#define SIMULATED_PRODUCT_H

#include <library_types.h>

#include "../timed.h"

struct product {
    double m, n, k, batch;
    cudaDataType in, out;
};

static inline int product_bytes_of(cudaDataType type) {
    switch (type) {
    case CUDA_R_8I:
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
        return 1;
    case CUDA_R_16F:
    case CUDA_R_16BF:
        return 2;
    case CUDA_R_64F:
    case CUDA_C_32F:
        return 8;
    case CUDA_C_64F:
        return 16;
    default:
        return 4;
    }
}

static inline void product_queue(void *stream, const struct product *product) {
    double m = product->m;
    double n = product->n;
    double k = product->k;
    int in = product_bytes_of(product->in);
    cusim_work work = {
        .kind = in <= 2 ? CUSIM_MATMUL16 : CUSIM_MATMUL32,
        .flops = 2 * m * n * k * product->batch,
        .bytes = (uint64_t)(product->batch *
                            ((m * k + k * n) * in + m * n * product_bytes_of(product->out))),
        .launches = 1,
        .name = "gemm",
    };
    cusimrt_worked(stream, &work);
}

#endif
