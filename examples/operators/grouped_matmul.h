// grouped_matmul.h - the kernel in place of CANN's: grouped_matmul.cpp on the CPU, .cu on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#define ACLNN_CMD(kernel, ...) kernel(__VA_ARGS__)

// Writes to result[0] the product of each group of x[0]'s rows with its matrix of weight[0]. All
// are contiguous float32 tensors on one device.
void aclnnGroupedMatmulV2(at::TensorList x, at::TensorList weight,
                          const std::vector<int64_t> &group_list, at::TensorList result);
