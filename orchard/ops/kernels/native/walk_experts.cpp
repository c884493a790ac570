// Mixtures of experts: each token takes its k best experts. Pairs of token and expert are ordered by expert, so that an
// expert's weights are read once for all its tokens.
//
// The step has three parts. `route` chooses, `compute` runs experts, `combine` adds up. Where the experts live elsewhere
// (Step::stride), Python calls the parts one by one (Engine::part): it looks at the choices, brings experts into slots, and
// computes those that are there, in as many goes as it takes. Every result lies in a place of its own until it is added up,
// in the order of the choices, so it does not matter in which go an expert was computed.
#include <vector>

#include "walk.h"

namespace orchard {
namespace {

struct Table {  // in shared memory (Engine::choices tells Python of the first three); P = rows * k pairs
    int32_t* expert;  // [rows][k] the choices
    float* weight;    // [rows][k]
    float* mass;      // [rows][experts] probabilities of all experts
    float* x;         // [rows][dim] normalised
    float* hidden;    // [P][hidden], in the order of pairs
    float* out;       // [P][dim]

    Table(const Step& step, const Block& memory, int rows) {
        const Weight& gate = step.outputs[1].weight;
        const size_t pairs = (size_t)rows * step.chosen;
        expert = memory.as<int32_t>();
        weight = (float*)(expert + pairs);
        mass = weight + pairs;
        x = mass + (size_t)rows * step.experts;
        hidden = x + (size_t)rows * gate.cols;
        out = hidden + pairs * gate.rows;
    }
};

// Where each expert's pairs begin, and which row and choice each pair is: computed by every thread alike.
struct Order {
    std::vector<int> begin, row, choice;
    Order(const Table& table, int rows, int k, int experts) : begin(experts + 1), row(rows * k), choice(rows * k) {
        for (int i = 0; i < rows * k; i++) begin[table.expert[i] + 1]++;
        for (int e = 0; e < experts; e++) begin[e + 1] += begin[e];
        std::vector<int> next(begin.begin(), begin.end() - 1);
        for (int i = 0; i < rows * k; i++) {
            int at = next[table.expert[i]]++;
            row[at] = i / k, choice[at] = i;
        }
    }
};

// An expert's matrix: one after another, or in a slot.
Weight expert_of(const Weight& all, const Step& step, const int32_t* slots, int expert) {
    Weight one = all;
    one.data += slots ? (size_t)slots[expert] * step.stride : (size_t)expert * all.bytes();
    return one;
}

// The k largest of `count` probabilities; the lower index first among equals.
void best(const float* mass, int count, int k, bool renormalize, int32_t* chosen, float* weights) {
    float total = 0;
    for (int i = 0; i < k; i++) {
        int top = -1;
        for (int e = 0; e < count; e++) {
            bool taken = false;
            for (int j = 0; j < i; j++) taken = taken || chosen[j] == e;
            if (!taken && (top < 0 || mass[e] > mass[top])) top = e;
        }
        chosen[i] = top, weights[i] = mass[top];
        total += mass[top];
    }
    for (int i = 0; renormalize && i < k; i++) weights[i] /= total;
}

}  // namespace

void Walk::experts(const Step& step) {
    route(step);
    barrier();
    compute(step, nullptr);
    barrier();
    combine(step);
}

// Normalise, score, choose.
void Walk::route(const Step& step) {
    const bool of_a_prompt = prompt;
    prompt = false;  // every token by itself: its experts are its own, and each thread works alone
    const OutputRef& router = step.outputs[0];
    const int count = rows(), k = step.chosen, dim = step.outputs[1].weight.cols;
    const VectorKernels& vector = *engine.vector_;
    const Table table(step, engine.expert_, count);
    for (int row = from(count); row < upto(count); row++) {
        float* x = table.x + (size_t)row * dim;
        const float* src = buffer(step.src) + (size_t)row * width(step.src);
        if (step.norm.weight)
            vector.norm(src, step.norm.weight, step.norm.eps, dim, x);
        else
            std::memcpy(x, src, (size_t)dim * 4);
        float* mass = table.mass + (size_t)row * step.experts;
        Input input = prepare(x, dim, NormRef(), step.outputs, 1, nullptr);
        multiply(router, input, 0, router.weight.blocks(), mass, step.experts, false);
        vector.softmax(mass, step.experts);
        best(mass, step.experts, k, step.renormalize, table.expert + (size_t)row * k, table.weight + (size_t)row * k);
    }
    prompt = of_a_prompt;
}

// The experts that tokens chose; with `slots`, those of them that have one (slots[expert] >= 0).
void Walk::compute(const Step& step, const int32_t* slots) {
    const bool of_a_prompt = prompt;
    prompt = false;
    const OutputRef &gate = step.outputs[1], &up = step.outputs[2], &down = step.outputs[3];
    const int count = rows(), dim = gate.weight.cols, hidden = gate.weight.rows;
    const VectorKernels& vector = *engine.vector_;
    const Table table(step, engine.expert_, count);
    scratch.gate.reserve((size_t)2 * SMALL * (hidden + 32) * 4 + 256);
    const Order order(table, count, step.chosen, step.experts);
    auto mine = [&](int e) { return order.begin[e + 1] > order.begin[e] && (!slots || slots[e] >= 0); };
    // Units of work: a block of rows of one expert's weights, for all the tokens of that expert.
    auto share = [&](int blocks, auto&& work) {
        int used = 0;
        for (int e = 0; e < step.experts; e++) used += mine(e);
        int begin = from(used * blocks), end = upto(used * blocks), before = 0;
        for (int e = 0; e < step.experts; e++) {
            if (!mine(e)) continue;
            int first = begin - before, last = end - before;
            first = first < 0 ? 0 : first, last = last > blocks ? blocks : last;
            if (first < last) work(e, first, last);
            before += blocks;
        }
    };
    const int widest = round_up(engine.plan_.widest, 64);
    // Up to SMALL tokens of an expert at a time, gathered into rows that follow each other.
    auto gathered = [&](const std::vector<OutputRef>& outputs, int at, int some, auto&& row_of, int cols) {
        float* rows = scratch.out.as<float>();
        for (int t = 0; t < some; t++) std::memcpy(rows + (size_t)t * widest, row_of(at + t), (size_t)cols * 4);
        Input input = prepare(rows, widest, NormRef(), outputs, some, nullptr);
        input.cols = cols;
        return input;
    };
    scratch.out.reserve((size_t)SMALL * widest * 4);
    const std::vector<OutputRef> wide = {gate, up}, back = {down};
    share(gate.weight.blocks(), [&](int e, int first, int last) {
        OutputRef g = gate, u = up;
        g.weight = expert_of(gate.weight, step, slots, e), u.weight = expert_of(up.weight, step, slots, e);
        const int begin = first * 32, width = (last * 32 < hidden ? last * 32 : hidden) - begin, ld = round_up(width, 16);
        float *gates = scratch.gate.as<float>(), *ups = gates + (size_t)SMALL * ld;
        for (int at = order.begin[e]; at < order.begin[e + 1]; at += SMALL) {
            int some = order.begin[e + 1] - at < SMALL ? order.begin[e + 1] - at : SMALL;
            Input input = gathered(wide, at, some, [&](int pair) { return table.x + (size_t)order.row[pair] * dim; }, dim);
            multiply(g, input, first, last, gates - begin, ld, false);
            multiply(u, input, first, last, ups - begin, ld, false);
            for (int t = 0; t < some; t++)
                vector.gate(gates + (size_t)t * ld, ups + (size_t)t * ld, width, step.activation,
                            table.hidden + (size_t)(at + t) * hidden + begin);
        }
    });
    barrier();
    share(down.weight.blocks(), [&](int e, int first, int last) {
        OutputRef d = down;
        d.weight = expert_of(down.weight, step, slots, e);
        for (int at = order.begin[e]; at < order.begin[e + 1]; at += SMALL) {
            int some = order.begin[e + 1] - at < SMALL ? order.begin[e + 1] - at : SMALL;
            Input input = gathered(back, at, some, [&](int pair) { return table.hidden + (size_t)pair * hidden; }, hidden);
            multiply(d, input, first, last, table.out + (size_t)at * dim, dim, false);
        }
    });
    prompt = of_a_prompt;
}

// The weighted sum, in the order of the choices.
void Walk::combine(const Step& step) {
    const int count = rows(), k = step.chosen, dim = step.outputs[1].weight.cols, pairs = count * k;
    const VectorKernels& vector = *engine.vector_;
    const Table table(step, engine.expert_, count);
    const Order order(table, count, k, step.experts);
    std::vector<int> place(pairs);
    for (int pair = 0; pair < pairs; pair++) place[order.choice[pair]] = pair;
    for (int row = from(count); row < upto(count); row++) {
        float* to = buffer(step.to) + (size_t)row * width(step.to);
        if (!step.add) std::memset(to, 0, (size_t)dim * 4);
        for (int i = row * k; i < (row + 1) * k; i++) vector.add_scaled(to, table.out + (size_t)place[i] * dim, table.weight[i], dim);
    }
}

}  // namespace orchard
