// again.cpp - what decides which bits an operator makes besides its arguments.
#include "again.hpp"

#include <ATen/Context.h>

#include <type_traits>
#include <utility>

namespace swapkit {

namespace {

// Values side by side, a fixed number of bits for each kind: no two settings have the same word.
class SettingsWord {
  public:
    template <class Value> void add(Value value) {
        constexpr std::uint64_t bits = std::is_same_v<Value, bool> ? 1 : 3;
        auto number = static_cast<std::uint64_t>(value);
        SWAPKIT_ASSERT(number < (std::uint64_t{1} << bits) && used_ + bits <= 64);
        word_ = word_ << bits | number;
        used_ += bits;
    }
    std::uint64_t get() const { return word_; }

  private:
    std::uint64_t word_ = 0, used_ = 0;
};

template <class Context> void add_precisions(SettingsWord &word, const Context &context) {
    using at::Float32Backend;
    using at::Float32Op;
    static const bool has_cuda = at::hasCUDA();
    // What holds for an operator, whether it was said of it, of its backend, or of all.
    for (auto op : {Float32Op::CONV, Float32Op::RNN, Float32Op::MATMUL}) {
        word.add(context.float32Precision(Float32Backend::MKLDNN, op));
        if (has_cuda) {
            word.add(context.float32Precision(Float32Backend::CUDA, op));
        }
    }
}

} // namespace

std::uint64_t settings_word() {
    const at::Context &context = at::globalContext();
    SettingsWord word;
    word.add(context.userEnabledMkldnn());
    word.add(context.deterministicMkldnn());
    word.add(context.userEnabledCuDNN());
    word.add(context.benchmarkCuDNN());
    word.add(context.deterministicCuDNN());
    word.add(context.allowFP16AccumulationCuBLAS());
    word.add(context.allowFP16ReductionCuBLAS());
    word.add(context.allowBF16ReductionCuBLAS());
    word.add(context.allowFP16ReductionCPU());
    word.add(context.userEnabledFlashSDP());
    word.add(context.userEnabledMemEfficientSDP());
    word.add(context.userEnabledMathSDP());
    word.add(context.userEnabledCuDNNSDP());
    word.add(context.allowFP16BF16ReductionMathSDP());
    add_precisions(word, context);
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
