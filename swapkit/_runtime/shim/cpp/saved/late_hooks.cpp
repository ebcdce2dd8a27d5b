// late_hooks.cpp - the saved-tensor hooks inside of compiled graphs.
//
// A compiled region is one node of autograd: torch packs what it saves when its forward returns,
// and unpacks all of it when its backward begins. So the region's graphs call these two operators,
// where they have made and where they first use each tensor (`_runtime/compiled/`). What autograd
// keeps is a handle: a tensor of the same layout without memory, for which torch compiles the
// backward. Its storage owns torch's `SavedVariable`, with the hooks on top of the stack where the
// forward ran; autograd's lifetime is the handle's. Any thread, with or without the GIL; torch
// takes it for hooks. No lock is held.
#include "memory/descriptions.hpp"
#include "memory/storages.hpp"
#include "saved/tensors.hpp"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
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

void drop_late(void *saved) { delete static_cast<SavedVariable *>(saved); }

constexpr char is_shared[] =
    "a compiled region has saved a tensor that shares memory with another one, which the schema of "
    "its operator does not say, and swapkit has packed that one. Set SWAPKIT_COMPILE=0 before the "
    "region is compiled, or let the operator return tensors of their own";

constexpr char no_memory[] =
    "a compiled region has saved this tensor, and swapkit has packed it: it has no memory. Set "
    "SWAPKIT_COMPILE=0 before the region is compiled for tools that read what autograd keeps";

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

// Return a new storage with the memory of one that the graph has made and does not use any more.
// The memory moves, not the storage: the graph may still hold views.
Storage moved(c10::StorageImpl &former) {
    std::unique_ptr<Description, void (*)(Description *)> description(description_of(&former),
                                                                      description_free);
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), former.nbytes(),
        former.set_data_ptr(c10::DataPtr(nullptr, former.device())), former.allocator(),
        former.resizable());
    former.set_nbytes(0);
    if (description != nullptr) {
        describe(storage.get(), description.get());
    }
    return storage;
}

// Return a tensor of the same layout in another storage.
at::Tensor with_storage(const at::Tensor &tensor, const Storage &storage,
                        const c10::VariableVersion &counter) {
    c10::TensorImpl *alias = detached(tensor.unsafeGetTensorImpl(), counter);
    exchange_storage(alias, storage.get(), 0);
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim(alias));
}

// Return tensors that have the memory of others, which lose it. Those that share memory share a
// version counter, as views do: the hooks keep only such tensors together.
std::vector<at::Tensor> take_memory(at::TensorList made) {
    const c10::VariableVersion counter(0);
    std::unordered_map<c10::StorageImpl *, Storage> storages;
    std::vector<at::Tensor> taken;
    taken.reserve(made.size());
    for (const at::Tensor &each : made) {
        c10::StorageImpl *former = each.storage().unsafeGetStorageImpl();
        auto [at, is_new] = storages.try_emplace(former);
        if (is_new) {
            TORCH_CHECK(former->data() != nullptr || each.numel() == 0, is_shared);
            at->second = moved(*former);
        }
        taken.push_back(with_storage(each, at->second, counter));
    }
    return taken;
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

// Return a handle of a tensor, which nothing but the handle holds from now on.
at::Tensor packed(const at::Tensor &tensor) {
    auto saved = std::make_unique<SavedVariable>(tensor, false);
    c10::DataPtr nothing(nullptr, saved.release(), &drop_late, tensor.device());
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                         std::move(nothing), nullptr, false);
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(no_memory);
    return with_storage(tensor, storage, c10::VariableVersion(0));
}

// `region`: a text about the region, with the first tensors that it packs; else empty.
std::vector<at::Tensor> pack_saved(at::TensorList made, std::string_view region) {
    if (!region.empty()) {
        note_region(region);
    }
    std::vector<at::Tensor> tensors = take_memory(made);
    for (at::Tensor &each : tensors) {
        each = packed(each);
    }
    return tensors;
}

// Return what a handle owns; null: a tensor that no graph has packed, such as that of a compiler
// which runs inductor's graphs as they are.
SavedVariable *saved_of(const at::Tensor &handle) {
    const c10::DataPtr &nothing =
        handle.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
    bool is_handle = nothing.get_deleter() == &drop_late;
    return is_handle ? static_cast<SavedVariable *>(nothing.get_context()) : nullptr;
}

// Return what was packed with one call: views share its memory until all of them are here.
std::vector<at::Tensor> unpack_saved(at::TensorList handles) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(handles.size());
    for (const at::Tensor &each : handles) {
        const SavedVariable *saved = saved_of(each);
        tensors.push_back(saved == nullptr ? each : saved->unpack());
    }
    const bool is_last = !torch::autograd::get_current_graph_task_keep_graph();
    for (const at::Tensor &each : handles) {
        SavedVariable *saved = is_last ? saved_of(each) : nullptr;
        if (saved != nullptr) {
            saved->reset_data(); // as autograd does with what a node has saved
        }
    }
    return tensors;
}

// A second copy of this library in the process finds the operators of the first one.
struct LateOperators {
    LateOperators() {
        if (!c10::Dispatcher::singleton().findSchema({"swapkit::pack_saved", ""})) {
            static torch::Library library(torch::Library::FRAGMENT, "swapkit", std::nullopt,
                                          __FILE__, __LINE__);
            library.def("pack_saved(Tensor[] made, str region) -> Tensor[]");
            library.def("pack_saved_(Tensor(a!)[] made, str region) -> Tensor[]");
            library.def("compiled_regions() -> str[]", compiled_regions);
            library.def("note_region(str region) -> ()", note_region);
            // As an alias, so that no compiler uses the memory for its own results: views share it.
            library.def("unpack_saved(Tensor(a)[] handles) -> Tensor(a)[]",
                        {at::Tag::flexible_layout});
            library.impl("pack_saved", c10::DispatchKey::CompositeExplicitAutograd, pack_saved);
            library.impl("pack_saved_", c10::DispatchKey::CompositeExplicitAutograd, pack_saved);
            library.impl("unpack_saved", c10::DispatchKey::CompositeExplicitAutograd, unpack_saved);
        }
    }
};
const LateOperators late_operators;

} // namespace

} // namespace swapkit
