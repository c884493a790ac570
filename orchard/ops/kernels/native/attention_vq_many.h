// Attention of a run of queries over codes (`many` of VqKernels): each block of slots becomes plain rows once, for all queries and heads.
// Single queries go through `vq_part`, which rounds a little differently: reading a prompt takes this way.
#pragma once
#include "attention_vq.h"

namespace orchard {
namespace {

size_t vq_many_scratch_bytes(const Store& store, int count, int T) {
    const VqBooks& b = *store.books;
    const size_t width = 2 * b.lanes, queries = (size_t)T * count;
    return (queries * (width + 2 + b.columns) + VQ_BLOCK * (2 * width + b.columns + 4) + width + 8 * VQ_BLOCK) * sizeof(float) + 64 * 12;
}

// What one query has seen so far.
struct VqState {
    float most, total;
};

// Scores of four heads at a time, [4][VQ_BLOCK], to weights [VQ_BLOCK][4]; sums of what came before are scaled down where needed.
template <class L>
void vq_weigh(float* scores, int heads, int begin, int end, float softcap, VqState* states, float* sums, int columns, float* weights) {
    typedef typename L::F F;
    for (int r = 0; r < 4; r++) {
        float* own = scores + r * VQ_BLOCK;
        if (r >= heads) {
            for (int s = 0; s < VQ_BLOCK; s++) weights[4 * s + r] = 0;
            continue;
        }
        for (int s = 0; s < VQ_BLOCK; s++)
            if (s < begin || s >= end) own[s] = 0;  // whatever lies there
        for (int s = 0; softcap > 0 && s < VQ_BLOCK; s += L::W) L::store(own + s, capped<L>(L::load(own + s), softcap));
        F highest = L::set(-INFINITY), sum = L::set(0);
        for (int s = 0; s < VQ_BLOCK; s++)
            if (s < begin || s >= end) own[s] = -INFINITY;
        for (int s = 0; s < VQ_BLOCK; s += L::W) highest = L::max(highest, L::load(own + s));
        const float top = L::largest(highest);
        if (top > states[r].most) {
            const float factor = states[r].most == -INFINITY ? 0 : expf(states[r].most - top);
            for (int c = 0; c < columns; c += L::W) L::store(sums + r * columns + c, L::mul(L::load(sums + r * columns + c), L::set(factor)));
            states[r].total *= factor, states[r].most = top;
        }
        for (int s = 0; s < VQ_BLOCK; s += L::W) {
            F e = exponential<L>(L::sub(L::load(own + s), L::set(states[r].most)));
            sum = L::add(sum, e);
            L::store(own + s, e);
        }
        states[r].total += L::sum(sum);
        for (int s = 0; s < VQ_BLOCK; s++) weights[4 * s + r] = own[s];
    }
}

template <class L>
void vq_many(const Store& store, int head, const float* q, int ldq, int count, int T, float scale, float softcap, const Visible& seen,
             float* out, int ldo, void* memory) {
    const Vq<L> vq(store, head);
    const VqBooks& b = vq.b;
    const int width = vq.width, columns = b.columns, start = seen.first / VQ_BLOCK * VQ_BLOCK;
    VqScratch scratch(memory);
    float *queries = scratch.floats((size_t)T * count * width), *sums = scratch.floats((size_t)T * count * columns);
    VqState* states = (VqState*)scratch.floats((size_t)2 * T * count);
    float *keys = scratch.floats((size_t)VQ_BLOCK * width), *angles = scratch.floats((size_t)VQ_BLOCK * width), *here = scratch.floats(width);
    float *values = scratch.floats((size_t)VQ_BLOCK * columns), *scores = scratch.floats(4 * VQ_BLOCK), *weights = scratch.floats(4 * VQ_BLOCK);
    const float *offset = b.value_offset + (size_t)head * b.dim, *turns = b.turns.empty() ? nullptr : b.turns.data();
    for (int t = 0; t < T; t++)
        for (int i = 0; i < count; i++) {
            vq.query(q + (size_t)t * ldq + (size_t)i * b.dim, scale, queries + ((size_t)t * count + i) * width);
            states[t * count + i] = {-INFINITY, 0};
        }
    memset(sums, 0, sizeof(float) * T * count * columns);
    memset(values, 0, sizeof(float) * VQ_BLOCK * columns);
    for (int base = start; base < seen.last; base += VQ_BLOCK) {
        const int first = larger(base, seen.first), last = smaller(base + VQ_BLOCK, seen.last);
        if (turns) {
            vq.turns_at(base, here);
            memcpy(angles, turns, sizeof(float) * VQ_BLOCK * width);
            for (int i = 0; i < VQ_BLOCK; i++)
                for (int at = 0; at < b.lanes; at += L::W) {
                    float* own = angles + (size_t)i * width + at;
                    typename L::F c = L::load(own), s = L::load(own + b.lanes);
                    vq.turn(c, s, here + at, here + b.lanes + at);
                    L::store(own, c), L::store(own + b.lanes, s);
                }
        }
        vq.key_rows(base, first, last, turns ? angles : nullptr, keys);
        for (int slot = first; slot < last; slot++) {
            float* row = values + (size_t)(slot - base) * columns;
            if (slot < b.exact) {
                memcpy(row, vq.exact_value(slot), sizeof(float) * b.dim);
            } else {
                vq.value_row(slot, row);
                for (int c = 0; c < b.dim; c++) row[c] += offset[c];
            }
        }
        for (int t = 0; t < T; t++) {
            const int query = seen.query + t, lowest = seen.window ? query - seen.window + 1 : 0;
            const int begin = larger(first, lowest) - base, end = smaller(last, query + 1) - base;
            if (begin >= end) continue;
            for (int from = 0; from < count; from += 4) {
                const int heads = smaller(count - from, 4);
                const size_t at = (size_t)t * count + from;
                typename Vq<L>::Dots dots{queries + at * width, keys, width, VQ_BLOCK / 4, VQ_BLOCK, scores};
                by_heads<L>(heads, dots);
                vq_weigh<L>(scores, heads, begin, end, softcap, states + at, sums + at * columns, columns, weights);
                by_heads<L>(heads, typename Vq<L>::Products{weights + 4 * begin, values + (size_t)begin * columns, end - begin, columns,
                                                            sums + at * columns});
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < count; i++) {
            const size_t at = (size_t)t * count + i;
            const float factor = states[at].total > 0 ? 1 / states[at].total : 0;
            for (int c = 0; c < b.dim; c++) out[(size_t)t * ldo + (size_t)i * b.dim + c] = sums[at * columns + c] * factor;
        }
}

template <class L>
const VqKernels vq_kernels = {vq_scratch_bytes, vq_part<L>, vq_many_scratch_bytes, vq_many<L>};

}  // namespace
}  // namespace orchard
