// Steps that are products with weights.
#include <cmath>

#include "walk.h"

namespace orchard {
namespace {

// Blocks of weights that a thread takes at a time when there are many rows: cores that share their machine with others do not run
// at one speed, so whoever is done first takes more.
constexpr int LINEAR_TASK = 3, GATED_TASK = 4;
constexpr int TASKS = 4;  // of each thread, where a task costs something to begin

}  // namespace

int block_at(const std::vector<OutputRef>& outputs, int thread, int threads) {
    size_t total = 0;
    int count = 0;
    for (const OutputRef& output : outputs) total += output.weight.bytes(), count += output.weight.blocks();
    if (thread == threads) return count;
    size_t wanted = total * thread / threads;
    count = 0;
    for (const OutputRef& output : outputs) {
        const size_t bytes = output.weight.bytes(), blocks = output.weight.blocks();
        if (wanted < bytes) return count + (int)(wanted * blocks / bytes);
        wanted -= bytes, count += (int)blocks;
    }
    return count;
}

void Walk::tables() {
    const Plan& plan = engine.plan_;
    for (size_t number = 0; number < plan.rotaries.size(); number++) {
        const RotarySpec& rotary = plan.rotaries[number];
        for (int row = from(rows()); row < upto(rows()); row++) {
            float* cosines = engine.cosines_[number].as<float>() + (size_t)row * rotary.half;
            float* sines = engine.sines_[number].as<float>() + (size_t)row * rotary.half;
            for (int i = 0; i < rotary.half; i++) {
                float angle = (float)engine.rows_.positions[row] * rotary.frequencies[i];
                cosines[i] = std::cos(angle) * rotary.gain;
                sines[i] = std::sin(angle) * rotary.gain;
            }
        }
    }
}

void Walk::embed(const Step& step) {
    const Weight& table = step.outputs[0].weight;
    for (int row = from(rows()); row < upto(rows()); row++) {
        float* out = buffer(step.to) + (size_t)row * width(step.to);
        engine.linear_->row(table, engine.tokens_[row], out);
        if (step.scale != 1) engine.vector_->scale(out, step.scale, table.cols);
    }
}

// The input of some matrices. Few rows: every thread prepares them all for itself. Many: each prepares a share and all meet.
// `chosen_rows`: which rows of src; null: the first `count`.
Input Walk::prepare(const float* src, int ldx, const NormRef& norm, const std::vector<OutputRef>& outputs, int count,
                    const int32_t* chosen_rows) {
    const int cols = outputs[0].weight.input_cols();
    const int widest = round_up(engine.plan_.widest, 64);
    Input input;
    input.rows = count, input.cols = cols;
    auto row_of = [&](int t) { return src + (size_t)(chosen_rows ? chosen_rows[t] : t) * ldx; };
    const bool many = prompt && engine.matrix_;  // without matrix units few rows and many are computed alike
    if (count <= SMALL && !many) {
        input.alone = true;
        input.x = src, input.ldx = ldx;
        if (norm.weight || chosen_rows) {
            input.x = scratch.x.as<float>(), input.ldx = widest;
            for (int t = 0; t < count; t++) {
                float* out = scratch.x.as<float>() + (size_t)t * widest;
                if (norm.weight)
                    engine.vector_->norm(row_of(t), norm.weight, norm.eps, cols, out);
                else
                    std::memcpy(out, row_of(t), (size_t)cols * 4);
            }
        }
        int groups = widest / 32;
        uint8_t* base = scratch.quant.as<uint8_t>();
        input.quant.digits = (int8_t*)base, input.quant.ldd = 2 * widest;
        input.quant.scale = (float*)(base + (size_t)2 * SMALL * widest), input.quant.ldg = groups;
        input.quant.sum = input.quant.scale + (size_t)SMALL * groups;
        return input;
    }
    if (many) {
        input.packed = engine.shared_.as<void>();
        const int stripes = (count + 31) / 32;
        for (int stripe = from(stripes); stripe < upto(stripes); stripe++) {
            int first = stripe * 32, last = first + 32 < count ? first + 32 : count;
            const float* x = src;
            int ld = ldx;
            if (norm.weight || chosen_rows) {
                ld = widest;
                for (int t = first; t < last; t++) {
                    float* out = scratch.x.as<float>() + (size_t)(t - first) * ld;
                    if (norm.weight)
                        engine.vector_->norm(row_of(t), norm.weight, norm.eps, cols, out);
                    else
                        std::memcpy(out, row_of(t), (size_t)cols * 4);
                }
                x = scratch.x.as<float>() - (size_t)first * ld;
            }
            engine.matrix_->pack(x, ld, count, cols, first, last, engine.shared_.as<void>());
        }
        if (thread == 0) engine.next_task_.store(0, std::memory_order_relaxed);
        barrier();
        return input;
    }
    int group = 0;
    for (const OutputRef& output : outputs)
        if (output.weight.quantised() && !group) group = output.weight.group;
    const int groups = widest / 32;
    float* x = engine.shared_.as<float>();
    input.x = x, input.ldx = widest;
    uint8_t* base = (uint8_t*)(x + (size_t)count * widest);
    input.quant.digits = (int8_t*)base, input.quant.ldd = 2 * widest;
    input.quant.scale = (float*)(base + (size_t)2 * count * widest), input.quant.ldg = groups;
    input.quant.sum = input.quant.scale + (size_t)count * groups;
    input.quant_group = group;
    for (int t = from(count); t < upto(count); t++) {
        float* out = x + (size_t)t * widest;
        if (norm.weight)
            engine.vector_->norm(row_of(t), norm.weight, norm.eps, cols, out);
        else
            std::memcpy(out, row_of(t), (size_t)cols * 4);
        if (group)
            quantise(out, cols, round_up(cols, group), group, input.quant.from(t));
    }
    if (thread == 0) engine.next_task_.store(0, std::memory_order_relaxed);
    barrier();
    return input;
}

void Walk::quantise(const float* x, int cols, int padded, int group, const QuantRows& to) const {
    engine.linear_->quantise(x, cols, padded, group, to.digits, to.scale, to.sum);
}

void Walk::need_quant(Input& input, const Weight& weight) {
    if (input.quant_group == weight.group) return;
    // Only where one step mixes formats of different groups. Everybody prepares all rows in scratch of his own.
    if (!input.alone) {
        const int widest = input.quant.ldd / 2, groups = input.quant.ldg;
        scratch.quant.reserve((size_t)input.rows * (2 * widest + 8 * groups));
        uint8_t* base = scratch.quant.as<uint8_t>();
        input.quant.digits = (int8_t*)base;
        input.quant.scale = (float*)(base + (size_t)2 * input.rows * widest);
        input.quant.sum = input.quant.scale + (size_t)input.rows * groups;
        input.alone = true;
    }
    for (int t = 0; t < input.rows; t++)
        quantise(input.x + (size_t)t * input.ldx, input.cols, weight.padded_cols(), weight.group, input.quant.from(t));
    input.quant_group = weight.group;
}

// y[t][r] (+)= W x for the rows of blocks [first, last); y points at row 0 of the weight.
void Walk::product(const Weight& weight, Input& input, int first, int last, float* y, int ldy, bool add) {
    if (input.packed) {
        int step = (int)(PANEL_BYTES / engine.matrix_->panel_bytes(weight, 1));
        if (step < 1) step = 1;
        engine.matrix_->begin();
        for (int block = first; block < last; block += step) {
            int end = block + step < last ? block + step : last;
            scratch.panel.reserve(engine.matrix_->panel_bytes(weight, end - block));
            engine.matrix_->panel(weight, block, end, scratch.panel.as<void>());
            engine.matrix_->multiply(weight, scratch.panel.as<void>(), block, end, input.packed, input.rows, 0, input.rows,
                                     y + (size_t)32 * block, ldy, add);
        }
        engine.matrix_->end();
    } else {
        if (weight.quantised()) need_quant(input, weight);
        // Where one call does not take all rows, weights that stay in the cache are used for all of them before the next are fetched.
        const int most = weight.quantised() ? engine.linear_->most : SMALL;
        int step = input.rows <= most ? last - first : (int)(PANEL_BYTES / weight.block_bytes()) + 1;
        for (int block = first; block < last; block += step) {
            int end = block + step < last ? block + step : last;
            for (int t = 0; t < input.rows; t += most) {
                int count = input.rows - t < most ? input.rows - t : most;
                float* out = y + (size_t)t * ldy;
                if (weight.quantised()) {
                    engine.linear_->linear_q(weight, block, end, input.quant.from(t), count, out, ldy, add);
                } else {
                    const float* x = input.x + (size_t)t * input.ldx + weight.from;
                    engine.linear_->linear_f(weight, block, end, x, input.ldx, count, out, ldy, add);
                }
            }
        }
    }
}

// The same with the output's gain and bias: y[t][r] (+)= gain[r] * (W x) + bias[r].
void Walk::multiply(const OutputRef& output, Input& input, int first, int last, float* y, int ldy, bool add) {
    if (first >= last) return;
    const int begin = first * 32, end = last * 32 < output.weight.rows ? last * 32 : output.weight.rows, count = end - begin;
    if (!output.gain) {
        product(output.weight, input, first, last, y, ldy, add);
        if (!output.bias) return;
        for (int t = 0; t < input.rows; t++) engine.vector_->add(y + (size_t)t * ldy + begin, output.bias + begin, count);
        return;
    }
    // What y may hold already has no gain: the product is made beside it.
    const int ld = round_up(count, 16);
    scratch.gained.reserve((size_t)input.rows * ld * 4);
    float* made = scratch.gained.as<float>();
    product(output.weight, input, first, last, made - begin, ld, false);
    for (int t = 0; t < input.rows; t++) {
        float *row = made + (size_t)t * ld, *to = y + (size_t)t * ldy + begin;
        engine.vector_->scale_each(row, output.gain + begin, count);
        if (output.bias) engine.vector_->add(row, output.bias + begin, count);
        if (add)
            engine.vector_->add(to, row, count);
        else
            std::memcpy(to, row, (size_t)count * 4);
    }
}

// Hands out blocks: to few rows each thread its part, as everybody prepared them for himself and none waits for another; to many
// rows a few at a time, `fewest` where they go through matrix units.
template <class Some>
void Walk::share(int blocks, const Input& input, int fewest, const Some& some) {
    if (input.alone) {
        if (from(blocks) < upto(blocks)) some(from(blocks), upto(blocks));
        return;
    }
    const int even = blocks / (TASKS * threads) + 1, task = input.packed || even < fewest ? fewest : even;
    for (int begin; (begin = task * engine.next_task_.fetch_add(1, std::memory_order_relaxed)) < blocks;)
        some(begin, begin + task < blocks ? begin + task : blocks);
}

void Walk::linear(const Step& step) {
    Input input = prepare(buffer(step.src), width(step.src), step.norm, step.outputs, rows(), nullptr);
    int total = 0;
    for (const OutputRef& output : step.outputs) total += output.weight.blocks();
    auto some = [&](int begin, int end) {
        int before = 0;
        for (const OutputRef& output : step.outputs) {
            int blocks = output.weight.blocks();
            int first = begin - before, last = end - before;
            first = first < 0 ? 0 : first, last = last > blocks ? blocks : last;
            multiply(output, input, first, last, buffer(output.to), width(output.to), output.add);
            before += blocks;
        }
    };
    if (!input.alone) return share(total, input, LINEAR_TASK, some);
    // Blocks of side paths weigh several times as much as those of the matrices they go beside: parts are cut by bytes.
    const int begin = block_at(step.outputs, thread, threads), end = block_at(step.outputs, thread + 1, threads);
    if (begin < end) some(begin, end);
}

void Walk::gated(const Step& step) {
    Input input = prepare(buffer(step.src), width(step.src), step.norm, step.outputs, rows(), nullptr);
    const OutputRef &gate = step.outputs[0], &up = step.outputs[1];
    const int hidden = gate.weight.rows, blocks = gate.weight.blocks();
    auto some = [&](int block, int end) {
        int begin = block * 32, count = (end * 32 < hidden ? end * 32 : hidden) - begin, ld = round_up(count, 16);
        scratch.gate.reserve((size_t)2 * input.rows * ld * 4);
        float *gates = scratch.gate.as<float>(), *ups = gates + (size_t)input.rows * ld;
        multiply(gate, input, block, end, gates - begin, ld, false);
        multiply(up, input, block, end, ups - begin, ld, false);
        for (int t = 0; t < input.rows; t++)
            engine.vector_->gate(gates + (size_t)t * ld, ups + (size_t)t * ld, count, step.activation,
                                 buffer(step.to) + (size_t)t * width(step.to) + begin);
    };
    share(blocks, input, GATED_TASK, some);  // a few at a time, so that gate and up are still in the cache when they meet
}

void Walk::head(const Step& step) {
    const int count = engine.wanted_count_;
    if (!count) return;
    const int32_t* chosen = engine.narrowed_ ? nullptr : engine.wanted_;
    Input input = prepare(buffer(step.src), width(step.src), step.norm, step.outputs, count, chosen);
    const OutputRef& output = step.outputs[0];
    const int blocks = output.weight.blocks(), vocab = output.weight.rows;
    share(blocks, input, blocks / (TASKS * threads) + 1, [&](int first, int last) {
        multiply(output, input, first, last, engine.scores_, vocab, false);
        if (!(step.bound > 0)) return;
        const int begin = first * 32, end = last * 32 < vocab ? last * 32 : vocab;
        for (int t = 0; t < count && begin < end; t++)
            engine.vector_->softcap(engine.scores_ + (size_t)t * vocab + begin, step.bound, end - begin);
    });
}

}  // namespace orchard
