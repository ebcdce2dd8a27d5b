// storages.hpp - what saved tensors need of torch below Python.
#ifndef SWAPKIT_STORAGES_HPP
#define SWAPKIT_STORAGES_HPP

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>

namespace swapkit {

// The part of a storage that a tensor views.
struct Span {
    std::size_t begin_bytes, end_bytes;
};

// The storage of a tensor, borrowed; null: it is not plain strided memory of at least
// `least_bytes`.
c10::StorageImpl *plain_storage(c10::TensorImpl &tensor, std::size_t least_bytes);
// Look at a tensor. Null: it is not plain strided memory of at least `least_bytes`; else its
// storage, borrowed, and the part of it that the tensor views.
c10::StorageImpl *look(c10::TensorImpl &tensor, std::size_t least_bytes, Span *out);

// Whether a tensor's bytes are there: those who manage storages themselves (FSDP) give memory back
// without a word.
inline bool has_memory(c10::TensorImpl &tensor) {
    Span span = {};
    const c10::StorageImpl *storage = look(tensor, 0, &span);
    return storage == nullptr || span.end_bytes <= storage->nbytes();
}

// Whether a mode or function transform of the user's would see an operator run on this thread.
bool is_observed();

// How many hold a storage; not its wrapper in Python, if nobody there has it.
// Needs the interpreter, or waits for it.
std::size_t count_holders(c10::StorageImpl *storage);
// Whether a storage has a wrapper in Python, without which it does not go.
bool is_known_to_python(c10::StorageImpl *storage);

// Give an alias a storage, from `shift` elements earlier on; null: an empty one.
void exchange_storage(c10::TensorImpl *alias, c10::StorageImpl *storage, std::int64_t shift);

} // namespace swapkit

extern "C" {

// A storage of its own with new memory from torch's allocator, of this thread's current stream; the
// caller holds it. Null: there is no memory, and swapkit_storage_error() says what torch would have
// raised.
c10::StorageImpl *swapkit_storage_new(std::size_t nbytes, std::int8_t device_type,
                                      std::int8_t device_index);
const char *swapkit_storage_error(bool *is_out_of_memory);

// One more holder of a storage, and one less, on any thread.
void swapkit_storage_hold(c10::StorageImpl *storage);
void swapkit_storage_drop(void *storage);

} // extern "C"

#endif
