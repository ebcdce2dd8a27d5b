// grouped_matmul.cpp - the kernel on the CPU. No torch operator runs: it works on the memory.
#include "grouped_matmul.h"

void aclnnGroupedMatmulV2(at::TensorList x, at::TensorList weight,
                          const std::vector<int64_t> &group_list, at::TensorList result) {
    const int64_t k = x[0].size(1), n = weight[0].size(2);
    const float *rows = x[0].const_data_ptr<float>();
    const float *matrices = weight[0].const_data_ptr<float>();
    float *out = result[0].mutable_data_ptr<float>();
    int64_t row = 0;
    for (std::size_t group = 0; group < group_list.size(); group++) {
        const float *matrix = matrices + static_cast<int64_t>(group) * k * n;
        for (; row < group_list[group]; row++) {
            for (int64_t column = 0; column < n; column++) {
                float sum = 0;
                for (int64_t i = 0; i < k; i++) {
                    sum += rows[row * k + i] * matrix[i * n + column];
                }
                out[row * n + column] = sum;
            }
        }
    }
}
