// libopapi.so: the operators that torch_npu calls without torch's dispatcher, which are copies.
//
// torch_npu copies between devices and casts by aclnnInplaceCopy and aclnnCast, which it finds here
// by name and puts into its own queue. They copy in the stream, by torch's CPU kernel. Any other
// operator is not found, and torch_npu says so.
//
// torch_npu calls ...GetWorkspaceSize() on the thread of the program and aclnn...() on the consumer
// thread of its queue (TASK_QUEUE_ENABLE=2: both there). No locks are held.

#include "rules.hpp"

#include <ATen/ops/from_blob.h>
#include <acl/acl_base.h>
#include <acl/acl_rt.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace simulated;

constexpr int kNoType = 161002; // ACLNN_ERR_PARAM_INVALID

std::optional<at::ScalarType> type_of(aclDataType type) {
    switch (type) {
    case ACL_FLOAT:
        return at::kFloat;
    case ACL_FLOAT16:
        return at::kHalf;
    case ACL_BF16:
        return at::kBFloat16;
    case ACL_DOUBLE:
        return at::kDouble;
    case ACL_INT8:
        return at::kChar;
    case ACL_INT16:
        return at::kShort;
    case ACL_INT32:
        return at::kInt;
    case ACL_INT64:
        return at::kLong;
    case ACL_UINT8:
        return at::kByte;
    case ACL_BOOL:
        return at::kBool;
    case ACL_COMPLEX64:
        return at::kComplexFloat;
    case ACL_COMPLEX128:
        return at::kComplexDouble;
    default:
        return std::nullopt;
    }
}

} // namespace

// A tensor as its operator sees it: nothing of it is kept alive.
struct aclTensor {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    std::optional<at::ScalarType> type;
    CUdeviceptr address;

    cusim_use use(bool write) const {
        int64_t last = 0;
        for (size_t i = 0; i < sizes.size(); i++) {
            last += (sizes[i] - 1) * strides[i];
        }
        size_t bytes = static_cast<size_t>(last + 1) * c10::elementSize(*type);
        return {address, write ? bytes : bytes + kOverRead, write};
    }

    bool is_empty() const {
        for (int64_t size : sizes) {
            if (size == 0) {
                return true;
            }
        }
        return false;
    }

    at::Tensor at_bytes(void *bytes) const {
        return at::from_blob(bytes, sizes, strides, at::TensorOptions().dtype(*type));
    }
};

// A copy, between its two calls.
struct aclOpExecutor {
    aclTensor to;
    aclTensor from;

    static void run(void *const *bytes, void *argument) {
        std::unique_ptr<aclOpExecutor> copy(static_cast<aclOpExecutor *>(argument));
        at::Tensor to = copy->to.at_bytes(bytes[0]);
        to.copy_(copy->from.at_bytes(bytes[1]));
    }
};

namespace {

int prepare(const aclTensor *to, const aclTensor *from, uint64_t *workspace,
            aclOpExecutor **executor) {
    if (!to->type || !from->type) {
        return kNoType;
    }
    *workspace = 0;
    *executor = new aclOpExecutor{*to, *from};
    return 0;
}

int launch(aclOpExecutor *executor, aclrtStream stream) {
    std::unique_ptr<aclOpExecutor> copy(executor);
    if (copy->to.is_empty()) {
        return 0;
    }
    const cusim_use uses[] = {copy->to.use(true), copy->from.use(false)};
    CUresult result =
        cusim_run(static_cast<CUstream>(stream), aclOpExecutor::run, copy.get(), uses, 2);
    if (result != static_cast<CUresult>(0)) {
        (void)std::fprintf(stderr, "simulated copy was refused: %s\n", cusim_last_refusal());
        return kRefused;
    }
    (void)copy.release(); // the driver's until it ran
    return 0;
}

} // namespace

EXPORT aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t dims, aclDataType type,
                                  const int64_t *strides, int64_t offset, aclFormat /*format*/,
                                  const int64_t * /*storage_sizes*/, uint64_t /*storage_dims*/,
                                  void *data) {
    std::optional<at::ScalarType> known = type_of(type);
    size_t first = known ? static_cast<size_t>(offset) * c10::elementSize(*known) : 0;
    return new aclTensor{{sizes, sizes + dims},
                         {strides, strides + dims},
                         known,
                         reinterpret_cast<CUdeviceptr>(data) + first};
}

EXPORT int aclDestroyTensor(const aclTensor *tensor) {
    delete tensor;
    return 0;
}

EXPORT int aclnnInplaceCopyGetWorkspaceSize(const aclTensor *self, const aclTensor *source,
                                            uint64_t *workspace, aclOpExecutor **executor) {
    return prepare(self, source, workspace, executor);
}

EXPORT int aclnnInplaceCopy(void * /*workspace*/, uint64_t /*size*/, aclOpExecutor *executor,
                            aclrtStream stream) {
    return launch(executor, stream);
}

EXPORT int aclnnCastGetWorkspaceSize(const aclTensor *self, aclDataType /*type*/, aclTensor *out,
                                     uint64_t *workspace, aclOpExecutor **executor) {
    return prepare(out, self, workspace, executor);
}

EXPORT int aclnnCast(void * /*workspace*/, uint64_t /*size*/, aclOpExecutor *executor,
                     aclrtStream stream) {
    return launch(executor, stream);
}
