// grouped_matmul.cpp - the kernel on the CPU. No torch operator runs: it works on the memory.
#include "grouped_matmul.h"

namespace {

// One row of a product: `row` has k numbers, `matrix` k rows of n.
void multiply_row(const float *row, const float *matrix, float *out, int64_t k, int64_t n) {
    for (int64_t column = 0; column < n; column++) {
        float sum = 0;
        for (int64_t i = 0; i < k; i++) {
            sum += row[i] * matrix[i * n + column];
        }
        out[column] = sum;
    }
}

} // namespace

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
            multiply_row(rows + row * k, matrix, out + row * n, k, n);
        }
    }
}
