// files.cpp - the files that weights are loaded from.
//
// An operator that copies the bytes of a mapped file into a weight (`load_state_dict`) shows where
// else they are: then a copy of the weight may be that part of the file. This is a guess, which the
// scheduler checks: the mapping may be private and changed, and the path another file by now.
#include "held/table.hpp"

#include "memory/storages.hpp"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

namespace swapkit {

// Never freed, as in `uses.cpp`; for later sessions, too. By storage, only compared: another one
// may have its address.
static std::unordered_map<const c10::StorageImpl *, FilePart> &files =
    *new std::unordered_map<const c10::StorageImpl *, FilePart>;

// Return the part of a mapped file at an address; without a path: there is none. The system alone
// knows: libraries map files themselves.
static FilePart mapped_at(std::uintptr_t address, std::size_t nbytes) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        char *rest = nullptr;
        std::uintptr_t begin = std::strtoull(line.c_str(), &rest, 16);
        std::uintptr_t end = *rest == '-' ? std::strtoull(rest + 1, &rest, 16) : 0;
        if (address < begin || address >= end) {
            continue;
        }
        std::istringstream fields(rest);
        std::string access, device, inode, path;
        std::uint64_t offset = 0;
        fields >> access >> std::hex >> offset >> device >> inode >> std::ws;
        std::getline(fields, path);
        bool is_whole = nbytes <= end - address && path.rfind('/', 0) == 0;
        return {.path = is_whole ? path : "", .offset = offset + (address - begin)};
    }
    return {};
}

FilePart file_of(c10::TensorImpl &tensor) {
    const c10::StorageImpl *storage =
        tensor.device().is_cpu() && !is_trapped(tensor) ? plain_storage(tensor, 1) : nullptr;
    if (storage == nullptr || storage->resizable() || !tensor.is_contiguous()) {
        return {};
    }
    auto begin = reinterpret_cast<std::uintptr_t>(address_of(storage));
    return mapped_at(begin + tensor.storage_offset() * tensor.itemsize(),
                     tensor.numel() * tensor.itemsize());
}

bool is_filled_by(const c10::TensorImpl &target, const c10::TensorImpl &source) {
    return is_trapped(target) && target.has_storage() && target.dtype() == source.dtype() &&
           target.is_contiguous() && target.numel() == source.numel() &&
           target.numel() * target.itemsize() == target.unsafe_storage().nbytes();
}

void held_loaded(const c10::TensorImpl &tensor, FilePart part) {
    std::lock_guard guard(held_lock);
    files[tensor.unsafe_storage().unsafeGetStorageImpl()] = std::move(part);
}

Ref<> held_file(Mover *, PyObject *tensor) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return {};
    }
    FilePart part = file_of(*impl);
    if (part.path.empty()) {
        return Ref<>::share(Py_None);
    }
    auto path = Ref<>::steal(PyUnicode_DecodeFSDefault(part.path.c_str()));
    return Ref<>::steal(path ? Py_BuildValue("(OK)", path.get(), part.offset) : nullptr);
}

bool note_file(Mover *, PyObject *tensor, PyObject *path, std::uint64_t offset) {
    c10::TensorImpl *impl = nullptr;
    auto bytes = Ref<>::steal(PyUnicode_EncodeFSDefault(path));
    if (!bytes || !impl_of(tensor, &impl)) {
        return false;
    }
    if (plain_storage(*impl, 1) != nullptr) {
        held_loaded(*impl, {.path = PyBytes_AS_STRING(bytes.get()), .offset = offset});
    }
    return true;
}

void forget_file(const c10::StorageImpl *storage) { files.erase(storage); }

void lend_file(const Group *group) {
    FilePart part;
    {
        std::lock_guard guard(held_lock);
        auto found = files.find(group->key.storage);
        part = found == files.end() ? FilePart{} : found->second;
    }
    if (!part.path.empty()) { // without it there is a copy as of any other
        (void)links.sk_group_borrow(group->native, part.path.c_str(), part.offset);
    }
}

} // namespace swapkit
