// grouped_matmul.cu - the kernel on CUDA.
#include "grouped_matmul.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace {

constexpr int threads = 256;

// One thread per element of the result of one group.
__global__ void multiply(const float *rows, const float *matrix, float *out, int64_t count,
                         int64_t k, int64_t n) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const int64_t row = at / n, column = at % n;
    float sum = 0;
    for (int64_t i = 0; i < k; i++) {
        sum += rows[row * k + i] * matrix[i * n + column];
    }
    out[at] = sum;
}

} // namespace

void aclnnGroupedMatmulV2(at::TensorList x, at::TensorList weight,
                          const std::vector<int64_t> &group_list, at::TensorList result) {
    const c10::cuda::CUDAGuard device(x[0].device());
    const int64_t k = x[0].size(1), n = weight[0].size(2);
    const float *rows = x[0].const_data_ptr<float>();
    const float *matrices = weight[0].const_data_ptr<float>();
    float *out = result[0].mutable_data_ptr<float>();
    int64_t begin = 0;
    for (std::size_t group = 0; group < group_list.size(); group++) {
        const int64_t count = (group_list[group] - begin) * n;
        if (count > 0) {
            const auto blocks = static_cast<unsigned>((count + threads - 1) / threads);
            multiply<<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
                rows + begin * k, matrices + static_cast<int64_t>(group) * k * n, out + begin * n,
                count, k, n);
            C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
        begin = group_list[group];
    }
}
