// announced_kernels.cpp - kernels that torch does not run and that announce themselves, and the
// functions of `swapkit.op`.
//
// The shim is the listener of the hooks (`swapkit_hooks.h`), for C++ and for `swapkit.op` alike.
// While such a kernel runs, it holds the storages of its operands: no rescue frees a storage that
// others hold, and no planned release frees its memory. The kernel may write to its operands and
// outputs, and no version counts that. So recipes that read or make these storages are settled, and
// copies of them count as outdated, those made meanwhile too.
//
// Any thread may call the hooks. A call takes the GIL, and holds the runtime's lock while it
// settles recipes or searches groups; it holds neither between two calls.
#include "memory/copy_owners.hpp"
#include "moves/mover.hpp"
#include "python/failures.hpp"
#include "python/links.hpp"
#include "recompute/capturing.hpp"
#include "recompute/recomputed.hpp"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace swapkit {

namespace {

// The runtime's side in Python, `process/announced_kernels.py`. Guarded by the GIL.
PyObject *owner = nullptr;
// Whether kernels are followed although no saved tensor needs it: for the labels of memory alone,
// or in full, for the names of saved tensors and for traces. Read without the GIL.
enum class Naming : std::uint8_t { none, labels, all };
std::atomic<Naming> naming{Naming::none};
// Whether this thread is inside a function of ours that raises what fails below.
thread_local bool is_raising = false;

// A storage that a kernel holds.
struct Held {
    c10::StorageImpl *storage; // owned
    bool is_written;           // perhaps
};

// A running kernel. Used by its own thread only.
struct Announced {
    std::uint32_t tag, outer_tag;
    Announced *outer;  // the thread's kernel that began before this one
    PyObject *tracked; // owned: the tracker's `RunningOperator`; null: Python does not track it
    std::size_t nbytes;
    std::vector<Held> held;
};

// The latest one that began of the thread's kernels.
thread_local Announced *innermost = nullptr;

// What a thread keeps between two kernels.
struct ThreadCache {
    std::unique_ptr<Announced> spare; // a thread's next kernel mostly takes over the latest one's
    std::uint32_t outer_tag = 0, tag = 0; // of the latest label
    std::string name;

    ~ThreadCache();
};

// Kernels that are open when their thread ends do so after the thread's `thread_local` objects are
// destroyed; this flag has no destructor.
thread_local bool is_cache_gone = false;
ThreadCache::~ThreadCache() { is_cache_gone = true; }

// Null: the thread is ending.
ThreadCache *find_cache() {
    if (is_cache_gone) {
        return nullptr;
    }
    static thread_local ThreadCache cache;
    return &cache;
}

Announced *make_kernel() {
    ThreadCache *cache = find_cache();
    Announced *kernel = cache != nullptr && cache->spare ? cache->spare.release() : new Announced{};
    kernel->outer = innermost;
    innermost = kernel;
    return kernel;
}

// Take a kernel off the thread's list; return whether it was the innermost one. Those that began
// right inside it are now inside the one around it.
bool unlink_kernel(Announced *kernel) {
    bool is_innermost = innermost == kernel;
    Announced **link = &innermost;
    while (*link != kernel) {
        if ((*link)->outer_tag == kernel->tag) {
            (*link)->outer_tag = kernel->outer_tag;
        }
        link = &(*link)->outer;
    }
    *link = kernel->outer;
    return is_innermost;
}

void drop_kernel(Announced *kernel) {
    kernel->held.clear();
    kernel->nbytes = 0;
    std::unique_ptr<Announced> dropped(kernel);
    if (ThreadCache *cache = find_cache(); cache != nullptr) {
        cache->spare = std::move(dropped);
    }
}

bool is_wanted() {
    return naming.load(std::memory_order_relaxed) != Naming::none || is_any_group() ||
           may_settle_any();
}

// ---- begin and end ------------------------------------------------------------------------------

// Tags of kernels, by the tag that they run under. Never freed: threads may outlive static objects.
struct Labels {
    std::mutex mutex;
    std::map<std::uint32_t, std::unordered_map<std::string, std::uint32_t>> known;
};
Labels &labels = *new Labels;
[[maybe_unused]] const int labels_at_fork = pthread_atfork(
    [] { labels.mutex.lock(); }, [] { labels.mutex.unlock(); }, [] { labels.mutex.unlock(); });

Ref<> text_of(const char *name) {
    return Ref<>::steal(
        PyUnicode_DecodeUTF8(name, static_cast<Py_ssize_t>(std::strlen(name)), "replace"));
}

// Return the tag that a Python call gives; 0, the tag of nothing: it raised.
std::uint32_t read_tag(const Ref<> &number) {
    unsigned long tag = number ? PyLong_AsUnsignedLong(number.get()) : 0;
    if (PyErr_Occurred() == nullptr) {
        return static_cast<std::uint32_t>(tag);
    }
    swallow(owner);
    return 0;
}

// Return the tag of a kernel that runs under another tag. Takes the GIL for a new one only.
std::uint32_t find_label(std::uint32_t outer_tag, const char *name) {
    {
        std::lock_guard lock(labels.mutex);
        auto &known = labels.known[outer_tag];
        auto found = known.find(name);
        if (found != known.end()) {
            return found->second;
        }
    }
    WithPython python;
    PutAside former;
    Ref<> text = text_of(name);
    std::uint32_t tag = read_tag(call_method<"label">(owner, outer_tag, text.get()));
    if (tag != 0) { // else it failed: the next kernel tries again
        std::lock_guard lock(labels.mutex);
        labels.known[outer_tag][name] = tag;
    }
    return tag;
}

// As `find_label`; most threads run the same kernel again.
std::uint32_t label_of(std::uint32_t outer_tag, const char *name) {
    ThreadCache *cache = find_cache();
    if (cache == nullptr) {
        return find_label(outer_tag, name);
    }
    if (cache->tag == 0 || cache->outer_tag != outer_tag || cache->name != name) {
        cache->tag = find_label(outer_tag, name);
        cache->outer_tag = outer_tag;
        cache->name = name;
    }
    return cache->tag;
}

// Begin a kernel in Python, too: find its tag, and a reference for its end.
void track(Announced *kernel, const char *name) {
    WithPython python;
    PutAside former;
    Ref<> text = text_of(name);
    Ref<> begun = call_method<"begin">(owner, text.get());
    unsigned int tag = 0;
    PyObject *tracked = nullptr;
    if (begun && PyArg_ParseTuple(begun.get(), "IO:begin", &tag, &tracked) != 0) {
        kernel->tracked = Py_NewRef(tracked);
    } else {
        swallow(owner);
    }
    kernel->tag = tag;
}

void *begin_kernel(const char *name) {
    Announced *kernel = make_kernel();
    kernel->outer_tag = links.sk_tag_set(0);
    if (naming.load(std::memory_order_relaxed) == Naming::all) {
        track(kernel, name);
    } else {
        kernel->tag = label_of(kernel->outer_tag, name);
    }
    (void)links.sk_tag_set(kernel->tag);
    return kernel;
}

// After a kernel: copies that were made of its operands meanwhile are outdated, too, and no group
// may be left with such a copy alone.
void renew_written(const Announced &kernel) {
    for (const Held &each : kernel.held) {
        if (each.is_written) {
            note_written(each.storage);
        }
    }
    if (!is_any_kept()) {
        return;
    }
    WithPython python;
    PutAside former;
    for (const Held &each : kernel.held) {
        if (each.is_written && !revive_kept(each.storage)) {
            swallow(owner);
        }
    }
}

// End a kernel in Python, too; return the tag of the thread's place if the kernel was not the
// innermost one there: an exception has left it open, or it ends before one inside it.
std::optional<std::uint32_t> untrack(Announced *kernel) {
    WithPython python;
    PutAside former;
    Ref<> tracked = Ref<>::steal(std::exchange(kernel->tracked, nullptr));
    Ref<> place = call_method<"end">(owner, tracked.get(), kernel->nbytes);
    if (!place) {
        swallow(owner);
        return std::nullopt;
    }
    return place.get() == Py_None ? std::nullopt : std::optional(read_tag(place));
}

void end_kernel(void *op) {
    auto *kernel = static_cast<Announced *>(op);
    if (is_any_group()) {
        renew_written(*kernel);
    }
    std::optional<std::uint32_t> place =
        kernel->tracked == nullptr ? std::nullopt : untrack(kernel);
    bool is_innermost = unlink_kernel(kernel);
    if (place.has_value() || is_innermost) { // else the tag is that of a kernel inside it
        (void)links.sk_tag_set(place.value_or(kernel->outer_tag));
    }
    for (const Held &each : kernel->held) {
        swapkit_storage_drop(each.storage);
    }
    drop_kernel(kernel);
}

// ---- operands and outputs -----------------------------------------------------------------------

// Which recipes to settle before a kernel may overwrite their operands. Those that a session
// captures are exempt: its plan detects by their bytes what kernels change. False: an exception is
// set.
bool find_settled(bool is_output, Settled *out) {
    int is_planned = is_output ? 0 : is_true<"is_planned">(owner);
    *out = is_planned == 1 ? Settled::chosen : Settled::all;
    return is_planned >= 0;
}

// Do for a storage that a kernel holds what needs Python. False: an exception is set.
bool prepare(c10::StorageImpl *storage, bool is_written, bool is_output) {
    if (is_any_kept() && !revive_kept(storage)) {
        return false;
    }
    Settled which = Settled::all;
    return !is_written || !may_settle_any() || !may_settle(storage) ||
           (find_settled(is_output, &which) && settle_uncaptured({storage}, is_output, which));
}

// Hold a storage whose reference is handed over. False: an exception is set.
bool hold(Announced *kernel, c10::StorageImpl *storage, bool is_written, bool is_output) {
    kernel->held.push_back({.storage = storage, .is_written = is_written});
    if (is_written && is_any_group()) {
        note_written(storage);
    }
    if (!is_any_kept() && !(is_written && may_settle_any() && may_settle(storage))) {
        return true;
    }
    WithPython python;
    return prepare(storage, is_written, is_output);
}

bool note_memory(Announced *kernel, const sk_op_memory *memory, bool is_output) {
    auto *storage = static_cast<c10::StorageImpl *>(memory->storage);
    kernel->nbytes += memory->nbytes;
    if (storage != nullptr) {
        swapkit_storage_hold(storage);
    } else if (memory->address != nullptr && is_any_group()) {
        WithPython python;
        if (!storage_at(memory->address, &storage)) {
            return false;
        }
    }
    bool is_written = is_output || !memory->is_only_read;
    return storage == nullptr || hold(kernel, storage, is_written, is_output);
}

// Turn the current exception into a result and a text. What a signal handler raised is kept.
sk_op_result describe_failure(char *text, std::size_t capacity) {
    bool is_memory = PyErr_ExceptionMatches(links.out_of_memory) != 0;
    bool is_error = PyErr_ExceptionMatches(PyExc_Exception) != 0;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref<> words = Ref<>::steal(value == nullptr ? nullptr : PyObject_Str(value));
    const char *utf8 = words ? PyUnicode_AsUTF8(words.get()) : nullptr;
    if (utf8 == nullptr || *utf8 == '\0') { // many exceptions have no text
        utf8 = reinterpret_cast<PyTypeObject *>(type)->tp_name;
    }
    (void)std::snprintf(text, capacity, "%s", utf8);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    if (is_error) {
        PyErr_Clear();
    } else {
        swallow(owner);
    }
    return is_memory ? SK_OP_OUT_OF_MEMORY : SK_OP_FAILED;
}

// Turn the current C++ exception into Python's, which the GIL guards.
bool raise_here() {
    WithPython python;
    raise_current();
    return false;
}

sk_op_result memory_of_kernel(void *op, const sk_op_memory *memory, bool is_output, char *text,
                              std::size_t capacity) {
    bool raises_here = std::exchange(is_raising, false); // what runs below may call hooks, too
    bool is_done = false;
    try {
        is_done = note_memory(static_cast<Announced *>(op), memory, is_output);
    } catch (const std::exception &) {
        is_done = raise_here();
    }
    is_raising = raises_here;
    if (is_done || raises_here) {
        return is_done ? SK_OP_OK : SK_OP_FAILED;
    }
    WithPython python;
    return describe_failure(text, capacity);
}

constexpr sk_op_listener listener = {
    .is_wanted = is_wanted, .begin = begin_kernel, .memory = memory_of_kernel, .end = end_kernel};

// ---- for Python ---------------------------------------------------------------------------------

// kernels_listen(owner): begin to follow kernels; None: stop.
void kernels_listen(PyObject *argument) {
    bool is_on = argument != Py_None;
    if (is_on) {
        owner = Py_NewRef(argument); // the former one is never released: kernels may still use it
    }
    links.sk_op_connect(is_on ? &listener : nullptr);
}

// kernels_name(naming): set what kernels are followed for although no saved tensor needs it; 0:
// nothing, 1: labels of memory, 2: all names.
bool kernels_name(std::int64_t chosen) {
    if (chosen < 0 || chosen > static_cast<std::int64_t>(Naming::all)) {
        PyErr_Format(PyExc_ValueError, "expected 0, 1 or 2, not %lld",
                     static_cast<long long>(chosen));
        return false;
    }
    naming = static_cast<Naming>(chosen);
    return true;
}

bool announce_tensor(std::uint64_t token, PyObject *tensor, bool is_output) {
    c10::TensorImpl *impl = nullptr;
    if (!impl_of(tensor, &impl)) {
        return false;
    }
    sk_op_memory memory = {};
    if (impl->has_storage()) {
        c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
        memory = {.address = address_of(storage),
                  .nbytes = storage->nbytes(),
                  .storage = storage,
                  .is_only_read = false};
    } else if (!impl->has_symbolic_sizes_strides()) {
        memory.nbytes = static_cast<std::size_t>(impl->numel()) * impl->itemsize();
    }
    is_raising = true;
    sk_op_result result = (is_output ? links.sk_op_output : links.sk_op_operand)(token, &memory);
    is_raising = false;
    return result == SK_OP_OK;
}

// kernel_memory(token, tensors, is_output): announce tensors of a kernel.
bool kernel_memory(std::uint64_t token, const Items &tensors, bool is_output) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](PyObject *tensor) { return announce_tensor(token, tensor, is_output); });
}

// kernels_sweep(): end what exceptions have left open on this thread.
// kernel_enter(name): begin a kernel; return its token, 0 if nothing needs it.
// kernel_leave(token): end a kernel.
const Functions kernel_functions{
    module_function<"kernels_listen", kernels_listen>(),
    module_function<"kernels_name", kernels_name>(),
    module_function<"kernels_sweep", [] { links.sk_op_sweep(); }>(),
    module_function<"kernel_enter", [](const char *name) { return links.sk_op_enter(name); }>(),
    module_function<"kernel_memory", kernel_memory>(),
    module_function<"kernel_leave", [](std::uint64_t token) { links.sk_op_leave(token); }>()};

} // namespace

} // namespace swapkit
