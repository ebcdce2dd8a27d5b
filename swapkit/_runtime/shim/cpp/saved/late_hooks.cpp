// late_hooks.cpp - the saved-tensor hooks inside of compiled graphs.
//
// A compiled region is one node of autograd: torch packs what it saves when its forward returns,
// and unpacks all of it when its backward begins. So the region's graphs call these two operators,
// where they have made and where they first use each tensor (`_runtime/compiled/`). What autograd
// keeps is a handle: a tensor on the CPU whose memory owns torch's `SavedVariable`, with the hooks
// on top of the stack where the forward ran; autograd's lifetime is the handle's. Any thread, with
// or without the GIL; torch takes it for hooks. No lock is held.
#include "memory/descriptions.hpp"
#include "memory/storages.hpp"
#include "saved/tensors.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

// As torch/csrc/autograd/graph_task.h declares it, which takes long to compile.
namespace torch::autograd {
bool get_current_graph_task_keep_graph(); // NOLINT(readability-identifier-naming)
} // namespace torch::autograd

namespace swapkit {

namespace {

using torch::autograd::SavedVariable;

constexpr std::size_t handle_bytes = 8;
constexpr std::size_t alignment = 64; // that compiled code may expect

struct alignas(alignment) Late {
    std::byte bytes[handle_bytes] = {};
    SavedVariable saved;
};

void drop_late(void *late) { delete static_cast<Late *>(late); }

// Return a tensor that has the memory of one that the graph has made and does not use any more. The
// memory itself moves, not the storage: the graph may still hold views.
at::Tensor take_memory(const at::Tensor &made) {
    c10::StorageImpl *former = made.storage().unsafeGetStorageImpl();
    std::unique_ptr<Description, void (*)(Description *)> description(description_of(former),
                                                                      description_free);
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), former->nbytes(),
        former->set_data_ptr(c10::DataPtr(nullptr, former->device())), former->allocator(),
        former->resizable());
    former->set_nbytes(0);
    if (description != nullptr) {
        describe(storage.get(), description.get());
    }
    c10::TensorImpl *alias = detached(made.unsafeGetTensorImpl(), c10::VariableVersion(0));
    exchange_storage(alias, storage.get(), 0);
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim(alias));
}

// Return a tensor with the same layout and bytes in memory of its own.
at::Tensor copied(const at::Tensor &tensor) {
    auto bytes = at::empty({0}, tensor.options().dtype(at::kByte));
    bytes.set_(tensor.storage(), 0, {static_cast<std::int64_t>(tensor.storage().nbytes())}, {1});
    auto result = at::empty({0}, tensor.options());
    return result.set_(bytes.clone().storage(), tensor.storage_offset(), tensor.sizes(),
                       tensor.strides());
}

// What compiled regions say of themselves, in the order in which they ran first. The text is in the
// graph, since torch's caches keep graphs beyond the process that made them.
struct Regions {
    std::mutex mutex;
    std::unordered_set<std::string> known;
    std::vector<std::string> texts;
};

Regions &regions() {
    static auto *found = new Regions; // torch's threads may run graphs while the process exits
    return *found;
}

void note_region(std::string_view text) {
    Regions &noted = regions();
    const std::lock_guard<std::mutex> guard(noted.mutex);
    auto [at, is_new] = noted.known.emplace(text);
    if (is_new) {
        noted.texts.push_back(*at);
    }
}

std::vector<std::string> compiled_regions() {
    Regions &noted = regions();
    const std::lock_guard<std::mutex> guard(noted.mutex);
    return noted.texts;
}

// `region`: a text about the region, with the first tensor that it packs; else empty.
at::Tensor pack_saved(const at::Tensor &made, std::string_view region) {
    if (!region.empty()) {
        note_region(region);
    }
    auto late = std::make_unique<Late>();
    late->saved = SavedVariable(take_memory(made), false);
    Late *owned = late.release();
    c10::DataPtr memory(owned, owned, &drop_late, c10::kCPU);
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), handle_bytes, std::move(memory), nullptr, false);
    auto handle = at::detail::make_tensor<c10::TensorImpl>( // twice as fast as torch's operators
        c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
        caffe2::TypeMeta::Make<std::uint8_t>());
    handle.unsafeGetTensorImpl()->set_sizes_contiguous({handle_bytes});
    return handle;
}

// `size` to `device` describe the result for compilers.
at::Tensor unpack_saved(const at::Tensor &handle, c10::SymIntArrayRef /*size*/,
                        c10::SymIntArrayRef /*stride*/, at::ScalarType /*type*/,
                        c10::Device /*device*/) {
    const c10::DataPtr &memory = handle.storage().data_ptr();
    TORCH_CHECK(
        memory.get_deleter() == &drop_late,
        "the handle of a tensor that a compiled region has saved was copied by other "
        "code's saved-tensor hooks. Leave tensors of ",
        handle_bytes,
        " bytes on the CPU as they are there, or set SWAPKIT_COMPILE=0 before the region is "
        "compiled");
    auto &saved = static_cast<Late *>(memory.get_context())->saved;
    at::Tensor tensor = saved.unpack();
    // Compiled code may write its own results into memory that it does not need any more.
    if (torch::autograd::get_current_graph_task_keep_graph()) {
        return copied(tensor);
    }
    saved.reset_data(); // as autograd does with what a node has saved
    return tensor;
}

// A second copy of this library in the process finds the operators of the first one.
struct LateOperators {
    LateOperators() {
        if (!c10::Dispatcher::singleton().findSchema({"swapkit::pack_saved", ""})) {
            static torch::Library library(torch::Library::FRAGMENT, "swapkit", std::nullopt,
                                          __FILE__, __LINE__);
            const std::vector<at::Tag> tags = {at::Tag::needs_exact_strides};
            library.def("pack_saved(Tensor made, str region) -> Tensor", tags);
            library.def("pack_saved_(Tensor(a!) made, str region) -> Tensor", tags);
            library.def("compiled_regions() -> str[]", compiled_regions);
            library.def("note_region(str region) -> ()", note_region);
            library.def("unpack_saved(Tensor handle, SymInt[] size, SymInt[] stride, "
                        "ScalarType dtype, Device device) -> Tensor",
                        tags);
            library.impl("pack_saved", c10::DispatchKey::CompositeExplicitAutograd, pack_saved);
            library.impl("pack_saved_", c10::DispatchKey::CompositeExplicitAutograd, pack_saved);
            library.impl("unpack_saved", c10::DispatchKey::CompositeExplicitAutograd, unpack_saved);
        }
    }
};
const LateOperators late_operators;

} // namespace

} // namespace swapkit
