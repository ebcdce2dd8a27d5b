// gmm.cpp - a grouped matrix product, hooked as MindSpeed's mindspeed/ops/csrc/cann/gmm.cpp is.
#include <torch/extension.h>

#include "NPUSwapManager.h" // NOTE: 添加头文件
#include "grouped_matmul.h"

// x: one matrix [tokens, k]; weight: one tensor [groups, k, n]; group_list: where each group of
// tokens ends. Returns [tokens, n].
std::vector<at::Tensor> npu_gmm(const std::vector<at::Tensor> &x,
                                const std::vector<at::Tensor> &weight,
                                const std::vector<int64_t> &group_list) {
    // NOTE: 添加算子调用前置位的Hook，设置算子名称和算子输入；若输出和输入相同，可在前置位设置。
    c10_npu::swap::NPUSwapManager::GetInstance().BeginHook("gmm_forward");
    c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(x);
    c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(weight);

    at::TensorList x_ = at::TensorList(x);
    at::TensorList weight_ = at::TensorList(weight);
    std::vector<at::Tensor> y = {at::empty({x[0].size(0), weight[0].size(2)}, x[0].options())};
    at::TensorList result = at::TensorList(y);

    ACLNN_CMD(aclnnGroupedMatmulV2, x_, weight_, group_list, result);

    // NOTE: 添加算子调用后置位的Hook，设置算子输出和结束标志；
    c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(y);
    c10_npu::swap::NPUSwapManager::GetInstance().PostHook();
    c10_npu::swap::NPUSwapManager::GetInstance().EndHook();

    return y;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    // Other threads run Python while the kernel runs; the hooks take the GIL by themselves.
    m.def("npu_gmm", &npu_gmm, pybind11::call_guard<pybind11::gil_scoped_release>());
}
