// repeat.cpp - torch's settings that affect the bits of an operator's result.
#include "recompute/repeat.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace swapkit {

namespace {

// Packs values into one word, each with a fixed number of bits: different settings, different word.
class SettingsWord {
  public:
    template <class Value> void add(Value value) {
        add(static_cast<std::uint64_t>(value), std::is_same_v<Value, bool> ? 1 : 3);
    }
    void add(std::uint64_t number, unsigned bits) {
        SWAPKIT_ASSERT(number < (std::uint64_t{1} << bits) && used_ + bits <= 64);
        word_ = word_ << bits | number;
        used_ += bits;
    }
    std::uint64_t get() const { return word_; }

  private:
    std::uint64_t word_ = 0;
    unsigned used_ = 0;
};

// Add the precision in effect per operator, whether set for it, for its backend, or globally.
template <class Context>
void add_precisions(SettingsWord &word, const Context &context, at::Float32Backend backend) {
    using at::Float32Op;
    for (auto op : {Float32Op::CONV, Float32Op::RNN, Float32Op::MATMUL}) {
        word.add(context.float32Precision(backend, op));
    }
}

// Whether this thread flushes denormals to zero: torch can set this, but not read it. Reads the
// register, since this runs for each captured operator and comparing a denormal takes 100 cycles.
bool flushes_denormals() {
#if defined(__SSE__)
    constexpr unsigned to_zero = 0x8040; // flush results, and treat operands as zero
    return (_mm_getcsr() & to_zero) != 0;
#else
    static const volatile double denormal = std::numeric_limits<double>::denorm_min();
    return denormal == 0;
#endif
}

// On the CPU a sum is split into as many parts as there are threads.
void add_thread(SettingsWord &word) {
    constexpr unsigned bits = 16;
    constexpr int most = (1 << bits) - 1;
    word.add(static_cast<std::uint64_t>(std::min(at::get_num_threads(), most)), bits);
    word.add(flushes_denormals());
}

// Settings of accelerators. Some exist only in newer releases of torch.
template <class Context> void add_accelerator(SettingsWord &word, Context &context) {
    static const bool has_cuda = at::hasCUDA();
    word.add(context.userEnabledCuDNN());
    word.add(context.benchmarkCuDNN());
    word.add(context.deterministicCuDNN());
    word.add(context.allowFP16AccumulationCuBLAS());
    word.add(context.allowFP16ReductionCuBLAS());
    word.add(context.allowBF16ReductionCuBLAS());
    word.add(context.linalgPreferredBackend());
    if (has_cuda) {
        word.add(context.blasPreferredBackend());
        add_precisions(word, context, at::Float32Backend::CUDA);
    }
    if constexpr (requires { context.cudnnDepthwiseKernel(); }) {
        word.add(context.cudnnDepthwiseKernel());
    }
    if constexpr (requires { context.userEnabledFA3SDP(); }) {
        word.add(context.userEnabledFA3SDP());
    }
}

} // namespace

std::uint64_t settings_word(c10::Device device) {
    at::Context &context = at::globalContext();
    SettingsWord word;
    word.add(context.deterministicAlgorithms());
    word.add(context.deterministicAlgorithmsWarnOnly());
    word.add(context.deterministicFillUninitializedMemory());
    word.add(static_cast<std::uint64_t>(c10::get_default_dtype_as_scalartype()), 6);
    word.add(context.userEnabledMkldnn());
    word.add(context.deterministicMkldnn());
    word.add(context.userEnabledNNPACK());
    word.add(context.allowFP16ReductionCPU());
    word.add(context.userEnabledFlashSDP());
    word.add(context.userEnabledMemEfficientSDP());
    word.add(context.userEnabledMathSDP());
    word.add(context.userEnabledCuDNNSDP());
    word.add(context.userEnabledOverrideableSDP());
    word.add(context.allowFP16BF16ReductionMathSDP());
    add_precisions(word, context, at::Float32Backend::MKLDNN);
    if (device.is_cpu()) {
        add_thread(word);
    } else {
        add_accelerator(word, context);
    }
    return word.get();
}

Ref<> settings_now(std::uint64_t word) {
    static std::uint64_t latest_word = 0;
    static PyObject *latest = nullptr;
    if (latest == nullptr || latest_word != word) {
        Ref<> noted = Ref<>::steal(PyObject_CallNoArgs(links.note_settings));
        if (!noted) {
            return noted;
        }
        Py_XDECREF(std::exchange(latest, noted.release()));
        latest_word = word;
    }
    return Ref<>::share(latest);
}

} // namespace swapkit
