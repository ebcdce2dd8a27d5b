// on_torch.cpp - the kernel by torch's operators, for any device: on an NPU they go through its
// queue.
#include "grouped_matmul.h"

#include <ATen/ops/mm.h>

void aclnnGroupedMatmulV2(at::TensorList x, at::TensorList weight,
                          const std::vector<int64_t> &group_list, at::TensorList result) {
    int64_t row = 0;
    for (std::size_t group = 0; group < group_list.size(); group++) {
        int64_t end = group_list[group];
        at::Tensor rows = x[0].slice(0, row, end);
        result[0]
            .slice(0, row, end)
            .copy_(at::mm(rows, weight[0].select(0, static_cast<int64_t>(group))));
        row = end;
    }
}
