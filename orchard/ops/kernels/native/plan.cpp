// Plans travel from Python as one list of 64-bit words: whole numbers as they are, reals as the bits of a double.
#include "engine.h"

namespace orchard {
namespace {

class Words {
  public:
    explicit Words(const int64_t* at) : at_(at) {}
    int number() { return (int)*at_++; }
    int64_t wide() { return *at_++; }
    float real() {
        double value;
        std::memcpy(&value, at_++, 8);
        return (float)value;
    }
    template <class T> const T* pointer() { return reinterpret_cast<const T*>(*at_++); }
    NormRef norm() {
        NormRef norm;
        norm.weight = pointer<float>();
        norm.eps = real();
        return norm;
    }
    OutputRef output() {
        OutputRef output;
        output.weight.kind = (Kind)number();
        output.weight.group = number();
        output.weight.minimum = number();
        output.weight.rows = number();
        output.weight.cols = number();
        output.weight.from = number();
        output.weight.width = number();
        output.weight.data = pointer<uint8_t>();
        output.gain = pointer<float>();
        output.bias = pointer<float>();
        output.to = number();
        output.add = number() != 0;
        return output;
    }
    std::shared_ptr<VqBooks> books(int heads, int dim) {
        auto books = std::make_shared<VqBooks>();
        books->heads = heads, books->dim = dim;
        books->key_rounds = number(), books->key_words = number();
        books->value_rounds = number(), books->value_words = number();
        books->exact = number();
        books->keys = pointer<float>(), books->values = pointer<float>();
        books->key_offset = pointer<float>(), books->value_offset = pointer<float>();
        books->key_weight = pointer<float>(), books->value_metric = pointer<float>();
        books->prepare();
        return books;
    }

  private:
    const int64_t* at_;
};

Step read_step(Words& words) {
    Step step;
    step.kind = (StepKind)words.number();
    step.src = words.number(), step.to = words.number();
    step.norm = words.norm();
    step.add = words.number() != 0;
    step.outputs.resize(words.number());
    for (OutputRef& output : step.outputs) output = words.output();
    step.scale = words.real();
    step.activation = (Activation)words.number();
    step.groups = words.number();
    step.bound = words.real();
    step.k = words.number(), step.v = words.number();
    step.store = words.number(), step.heads = words.number(), step.kv_heads = words.number(), step.dim = words.number();
    step.window = words.number(), step.rotary = words.number();
    step.q_norm = words.norm(), step.k_norm = words.norm();
    step.experts = words.number(), step.chosen = words.number();
    step.renormalize = words.number() != 0;
    step.stride = words.wide();
    step.buffers.resize(words.number());
    for (int& buffer : step.buffers) buffer = words.number();
    return step;
}

}  // namespace

Plan read_plan(const int64_t* at) {
    Words words(at);
    Plan plan;
    plan.vocab = words.number();
    plan.widths.resize(words.number());
    for (int& width : plan.widths) width = words.number();
    plan.stores.resize(words.number());
    for (StoreSpec& store : plan.stores) {
        store.codec = (Codec)words.number();
        store.heads = words.number(), store.dim = words.number(), store.keep = words.number(), store.sinks = words.number();
        if (store.codec == Codec::VQ) store.books = words.books(store.heads, store.dim);
    }
    plan.rotaries.resize(words.number());
    for (RotarySpec& rotary : plan.rotaries) {
        rotary.frequencies = words.pointer<float>();
        rotary.half = words.number();
        rotary.gain = words.real();
    }
    for (int left = words.number(); left > 0; left--) plan.steps.push_back(read_step(words));
    for (const Step& step : plan.steps)  // keys of codes are rotated when they are read, as the layer that wrote them would have
        if (step.kind == StepKind::Attend && step.k >= 0 && plan.stores[step.store].books && step.rotary >= 0) {
            const RotarySpec& rotary = plan.rotaries[step.rotary];
            plan.stores[step.store].books->rotate_by(rotary.frequencies, rotary.half, rotary.gain);
        }
    for (const Step& step : plan.steps)
        for (const OutputRef& output : step.outputs)
            for (int cols : {output.weight.padded_cols(), output.weight.input_cols()}) plan.widest = cols > plan.widest ? cols : plan.widest;
    return plan;
}

}  // namespace orchard
