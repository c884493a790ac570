// Attention of single queries over a store, written once over a thin vector layer (portable, AVX2, NEON, AVX-512).
//
// A layer L gives a vector type F of L::W floats (a power of two up to 16) and a few operations on it; see
// attention_portable.cpp for the list. Everything here is in an unnamed namespace: each file that includes it gets copies of its
// own, compiled for its own instruction set, which the linker must never merge.
//
// Slots are taken SPAN at a time: scores of all heads, then a softmax relative to the largest score so far, then values. Each
// span of keys and values is read from memory once for all heads; heads and columns go in blocks that fit the registers.
#pragma once
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace orchard {

void attention_put(const Store& store, int head, int slot, const float* k, const float* v);  // attention.cpp

namespace {

constexpr int SPAN = 256;  // slots per round: scores, keys and values of a round stay in the nearest caches
constexpr int STEP = 32;   // slots per call of the score kernel; capacities are multiples of it
constexpr int BLOCK = 16;  // slots that lie side by side in a block of keys

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------------------------------
// Which slots are seen.

// Runs of pairs of slots in a span: `sees` 3 both slots, 1 only the first, 2 only the second. Pairs nobody sees are in no run, so
// that whatever lies there (it may be no number at all) is never multiplied.
struct Run {
    int begin, end, sees;
};

struct Runs {
    int count = 0;
    Run run[SPAN / 2];

    void add(int begin, int end, int sees) {
        if (!sees) return;
        if (count && sees == 3 && run[count - 1].sees == 3 && run[count - 1].end == begin) run[count - 1].end = end;
        else run[count++] = {begin, end, sees};
    }
};

enum Seen : uint8_t { NONE, SOME, ALL };

// What is seen of the slots base .. base + SPAN: per slot (mask: 0 or -1), per step, and as runs of pairs.
struct Mask {
    alignas(64) int32_t slot[SPAN];
    Seen step[SPAN / STEP];
    Runs runs;

    // Answers whether anything is seen.
    bool look(const Visible& seen, int base, int end) {
        runs.count = 0;
        bool any = false;
        for (int from = base; from < end; from += STEP) {
            int at = from - base, lo = larger(seen.first - from, 0), hi = smaller(seen.last - from, STEP);
            if (!seen.positions && lo == 0 && hi == STEP) {
                step[at / STEP] = ALL;
            } else {
                step[at / STEP] = look_closely(seen, from, lo, hi, slot + at);
            }
            any |= step[at / STEP] != NONE;
            if (step[at / STEP] == ALL) runs.add(at / 2, (at + STEP) / 2, 3);
            if (step[at / STEP] != SOME) continue;
            for (int s = at; s < at + STEP; s += 2) runs.add(s / 2, s / 2 + 1, (slot[s] & 1) | (slot[s + 1] & 2));
        }
        return any;
    }

  private:
    static Seen look_closely(const Visible& seen, int from, int lo, int hi, int32_t* mask) {
        if (seen.positions) {
            // Positions count from 0 and -1 is nothing, so a bound of -1 lets every position pass.
            const int32_t above = larger(-1, seen.window ? seen.query - seen.window : -1);
            const int32_t kept_above = larger(-1, seen.keep ? seen.query - seen.keep : -1);
            const int32_t* positions = seen.positions + from;
            for (int s = 0; s < STEP; s++) {
                int32_t p = positions[s];
                mask[s] = -(int32_t)((p <= seen.query) & (p > above) & ((p > kept_above) | (p < seen.sinks)));
            }
        } else {
            for (int s = 0; s < STEP; s++) mask[s] = -1;
        }
        for (int s = 0; s < lo; s++) mask[s] = 0;
        for (int s = larger(hi, 0); s < STEP; s++) mask[s] = 0;
        int sum = 0;
        for (int s = 0; s < STEP; s++) sum -= mask[s];
        return sum == 0 ? NONE : sum == STEP ? ALL : SOME;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Codecs: two neighbouring channels of W slots, two neighbouring slots of W columns. `k` and `v` point at the head.

template <class L>
struct ReadF32 {
    static constexpr bool SCALED = false;
    typedef typename L::F F;
    static const uint8_t* keys(const uint8_t* k, int width, int slot) { return k + (size_t)slot * width * 4; }
    static const uint8_t* values(const uint8_t* v, int width, int slot) { return v + (size_t)slot * width * 4; }
    static const uint8_t* key_place(const uint8_t* block, int pair, int slot) { return block + (pair * 2 * BLOCK + slot) * 4; }
    static const uint8_t* value_place(const uint8_t* row, int column) { return row + column * 4; }
    static void key_pair(const uint8_t* block, int pair, int slot, F& even, F& odd) {
        const float* at = (const float*)key_place(block, pair, slot);
        even = L::load(at), odd = L::load(at + BLOCK);
    }
    static void value_pair(const uint8_t* row, int width, int column, F& even, F& odd) {
        const float* at = (const float*)value_place(row, column);
        even = L::load(at), odd = L::load(at + width);
    }
};

template <class L>
struct ReadBf16 {
    static constexpr bool SCALED = false;
    typedef typename L::F F;
    static const uint8_t* keys(const uint8_t* k, int width, int slot) { return k + (size_t)slot * width * 2; }
    static const uint8_t* values(const uint8_t* v, int width, int slot) { return v + (size_t)slot * width * 2; }
    static const uint8_t* key_place(const uint8_t* block, int pair, int slot) { return block + (pair * BLOCK + slot) * 4; }
    static const uint8_t* value_place(const uint8_t* row, int column) { return row + column * 4; }
    static void key_pair(const uint8_t* block, int pair, int slot, F& even, F& odd) {
        L::bf16_pairs(key_place(block, pair, slot), even, odd);
    }
    static void value_pair(const uint8_t* row, int, int column, F& even, F& odd) {
        L::bf16_pairs(value_place(row, column), even, odd);
    }
};

template <class L>
struct ReadInt8 {
    static constexpr bool SCALED = true;
    typedef typename L::F F;
    static const uint8_t* keys(const uint8_t* k, int width, int slot) { return k + (size_t)slot * width; }
    static const uint8_t* values(const uint8_t* v, int width, int slot) { return v + (size_t)slot * width; }
    static const uint8_t* key_place(const uint8_t* block, int pair, int slot) { return block + (pair * BLOCK + slot) * 2; }
    static const uint8_t* value_place(const uint8_t* row, int column) { return row + column * 2; }
    static void key_pair(const uint8_t* block, int pair, int slot, F& even, F& odd) {
        L::int8_pairs(key_place(block, pair, slot), even, odd);
    }
    static void value_pair(const uint8_t* row, int, int column, F& even, F& odd) {
        L::int8_pairs(value_place(row, column), even, odd);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic.

// e^x to about 2e-7 of its value for x up to 88; 0 below -87, so that a score of -inf weighs nothing.
template <class L>
inline typename L::F exponential(typename L::F x) {
    typedef typename L::F F;
    F clamped = L::max(x, L::set(-87.0f));
    F n = L::round(L::mul(clamped, L::set(1.44269504f)));
    F r = L::fma(n, L::set(-0.693145751953125f), clamped);  // ln 2 in two parts: the first times n is exact
    r = L::fma(n, L::set(-1.42860677e-6f), r);
    F y = L::set(1.0f / 720);
    y = L::fma(y, r, L::set(1.0f / 120));
    y = L::fma(y, r, L::set(1.0f / 24));
    y = L::fma(y, r, L::set(1.0f / 6));
    y = L::fma(y, r, L::set(0.5f));
    y = L::fma(y, r, L::set(1.0f));
    y = L::fma(y, r, L::set(1.0f));
    return L::zero_below(L::mul(y, L::power_of_two(n)), x, -87.0f);
}

// cap * tanh(x / cap), from (1 - e) / (1 + e) with e = exp(-2 |x| / cap).
template <class L>
inline typename L::F capped(typename L::F x, float cap) {
    typedef typename L::F F;
    F e = exponential<L>(L::mul(L::abs(x), L::set(-2 / cap)));
    F y = L::div(L::sub(L::set(cap), L::mul(e, L::set(cap))), L::add(L::set(1), e));
    return L::with_sign_of(y, x);
}

// The two inner loops, for R heads at once. A layer with something better for a codec specialises this. Lines are asked for AHEAD
// bytes before they are needed; what is asked for past the end of a span is the beginning of the next one.
template <class L, class Codec>
struct Kernel {
    typedef typename L::F F;
    static constexpr int FAR = 16384, NEAR = 1024;

    // Queries and weights may be turned in place into what the loops want, with one factor per head to be multiplied back.
    static void prepare_query(float*, int, float*) {}
    static void prepare_weights(float*, int, float*) {}

    // Scores of STEP slots: out[r * SPAN + slot]. q: R rows of `width`.
    template <int R>
    static void score_step(const uint8_t* keys, int width, const float* q, const float*, float* out) {
        constexpr int VECTORS = L::SCORE_SLOTS / L::W;
        constexpr int SUMS = R * VECTORS * 2 <= L::REGISTERS ? 2 : 1;  // one for odd channels too: additions need not wait
        for (int from = 0; from < STEP; from += L::SCORE_SLOTS) {
            F sum[R][VECTORS][SUMS];
            for (int r = 0; r < R; r++)
                for (int i = 0; i < VECTORS * SUMS; i++) sum[r][i / SUMS][i % SUMS] = L::set(0);
            for (int pair = 0; pair < width / 2; pair++) {
                for (int i = 0; i < VECTORS; i++) {
                    F even, odd;
                    int slot = from + i * L::W;
                    const uint8_t* block = Codec::keys(keys, width, slot / BLOCK * BLOCK);
                    if (slot % BLOCK == 0) {
                        __builtin_prefetch(Codec::key_place(block, pair, 0) + FAR, 0, 2);
                        __builtin_prefetch(Codec::key_place(block, pair, 0) + NEAR, 0, 3);
                    }
                    Codec::key_pair(block, pair, slot % BLOCK, even, odd);
                    for (int r = 0; r < R; r++) {
                        sum[r][i][0] = L::fma(even, L::set(q[r * width + pair * 2]), sum[r][i][0]);
                        sum[r][i][SUMS - 1] = L::fma(odd, L::set(q[r * width + pair * 2 + 1]), sum[r][i][SUMS - 1]);
                    }
                }
            }
            for (int r = 0; r < R; r++)
                for (int i = 0; i < VECTORS; i++) {
                    F all = SUMS == 1 ? sum[r][i][0] : L::add(sum[r][i][0], sum[r][i][SUMS - 1]);
                    L::store(out + r * SPAN + from + i * L::W, all);
                }
        }
    }

    // sums[r * width + column ..] += p[r * SPAN + slot] * value, over pairs and C vectors of columns. WHOLE: run.sees is 3.
    template <int R, int C, bool WHOLE>
    static void value_run(const uint8_t* v, int width, int column, const Run& run, const float* p, const float*, float* sums) {
        F sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = L::load(sums + r * width + column + c * L::W);
        for (int pair = run.begin; pair < run.end; pair++) {
            const uint8_t* row = Codec::values(v, width, pair * 2);
            for (int c = 0; c < C; c++) {
                F even, odd;
                __builtin_prefetch(Codec::value_place(row, column + c * L::W) + FAR, 0, 2);
                __builtin_prefetch(Codec::value_place(row, column + c * L::W) + NEAR, 0, 3);
                Codec::value_pair(row, width, column + c * L::W, even, odd);
                if (!WHOLE && !(run.sees & 1)) even = L::set(0);
                if (!WHOLE && !(run.sees & 2)) odd = L::set(0);
                for (int r = 0; r < R; r++) {
                    sum[r][c] = L::fma(even, L::set(p[r * SPAN + pair * 2]), sum[r][c]);
                    sum[r][c] = L::fma(odd, L::set(p[r * SPAN + pair * 2 + 1]), sum[r][c]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) L::store(sums + r * width + column + c * L::W, sum[r][c]);
    }
};

template <class L, class Codec, int R, bool WHOLE>
void value_columns(const uint8_t* v, int width, const Run& run, const float* p, const float* factor, float* sums) {
    int column = 0;
    for (; width - column >= L::COLUMNS * L::W; column += L::COLUMNS * L::W)
        Kernel<L, Codec>::template value_run<R, L::COLUMNS, WHOLE>(v, width, column, run, p, factor, sums);
    for (; column < width; column += 2 * L::W)  // widths are multiples of 32: two vectors of 16 at the least
        Kernel<L, Codec>::template value_run<R, 2, WHOLE>(v, width, column, run, p, factor, sums);
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole of `part`.

struct Scratch {
    float *q, *scores, *sums, *query_factor, *weight_factor;
    Scratch(void* memory, int width, int count) {
        q = (float*)(((uintptr_t)memory + 63) / 64 * 64);
        sums = q + count * width;
        scores = sums + count * width;
        query_factor = scores + count * SPAN;
        weight_factor = query_factor + count;
    }
    static size_t bytes(int width, int count) { return 64 + (size_t)count * (2 * width + SPAN + 2) * sizeof(float); }
};

size_t scratch_bytes(const Store& store, int, int count) { return Scratch::bytes(store.width, count); }

// Scores to weights in place, for one head: exp(score - most so far), times the scale of the value where the codec has one.
template <class L, class Codec>
void weigh(float* scores, int slots, const Mask& mask, const float* k_scale, const float* v_scale, float softcap, float* sums,
           int width, float* most, float* total) {
    typedef typename L::F F;
    F highest = L::set(-INFINITY);
    for (int s = 0; s < slots; s += L::W) {
        F x = L::load(scores + s);
        if (Codec::SCALED) x = L::mul(x, L::load(k_scale + s));
        if (softcap > 0) x = capped<L>(x, softcap);
        if (mask.step[s / STEP] != ALL) x = L::where(mask.slot + s, x, L::set(-INFINITY));
        L::store(scores + s, x);
        highest = L::max(highest, x);
    }
    float top = L::largest(highest);
    if (top == -INFINITY) {
        for (int s = 0; s < slots; s += L::W) L::store(scores + s, L::set(0));
        return;
    }
    if (top > *most) {
        float factor = *most == -INFINITY ? 0 : expf(*most - top);
        for (int c = 0; c < width; c += L::W) L::store(sums + c, L::mul(L::load(sums + c), L::set(factor)));
        *total *= factor;
        *most = top;
    }
    F sum = L::set(0), base = L::set(*most);
    for (int s = 0; s < slots; s += L::W) {
        F e = exponential<L>(L::sub(L::load(scores + s), base));
        sum = L::add(sum, e);
        if (Codec::SCALED) {
            e = L::mul(e, L::load(v_scale + s));
            if (mask.step[s / STEP] != ALL) e = L::where(mask.slot + s, e, L::set(0));  // the scale may be no number there
        }
        L::store(scores + s, e);
    }
    *total += L::sum(sum);
}

// Calls `work.template run<R>(first)` for blocks of up to L::HEADS of `count` heads, as even as can be.
template <class L, class Work>
void by_heads(int count, const Work& work) {
    int blocks = (count + L::HEADS - 1) / L::HEADS;
    for (int first = 0; blocks > 0; blocks--) {
        int heads = (count - first + blocks - 1) / blocks;
        switch (heads) {
            case 1: work.template run<1>(first); break;
            case 2: work.template run<2>(first); break;
            case 3: work.template run<3>(first); break;
            default: work.template run<4>(first); break;
        }
        first += heads;
    }
}

template <class L, class Codec>
struct Scores {
    const uint8_t* keys;
    int width, at;
    const Scratch& scratch;
    template <int R>
    void run(int first) const {
        Kernel<L, Codec>::template score_step<R>(keys, width, scratch.q + first * width, scratch.query_factor + first,
                                                 scratch.scores + first * SPAN + at);
    }
};

template <class L, class Codec>
struct Values {
    const uint8_t* values;
    int width;
    const Runs& runs;
    const Scratch& scratch;
    template <int R>
    void run(int first) const {
        const float *p = scratch.scores + first * SPAN, *factor = scratch.weight_factor + first;
        for (int i = 0; i < runs.count; i++) {
            auto columns = runs.run[i].sees == 3 ? value_columns<L, Codec, R, true> : value_columns<L, Codec, R, false>;
            columns(values, width, runs.run[i], p, factor, scratch.sums + first * width);
        }
    }
};

template <class L, class Codec>
void part_of(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
             float* out, int ldo, float* most, float* total, void* memory) {
    static_assert(L::HEADS <= 4 && L::SCORE_SLOTS <= STEP, "see by_heads and score_step");
    const int width = store.width;
    const Scratch scratch(memory, width, count);
    const uint8_t *k = store.k + head * store.head_bytes(), *v = store.v + head * store.head_bytes();
    for (int i = 0; i < count; i++) {
        most[i] = -INFINITY, total[i] = 0;
        for (int c = 0; c < width; c++) {
            scratch.q[i * width + c] = c < store.dim ? q[i * ldq + c] * scale : 0;
            scratch.sums[i * width + c] = 0;
        }
        Kernel<L, Codec>::prepare_query(scratch.q + i * width, width, scratch.query_factor + i);
    }
    Mask mask;
    for (int base = seen.first / STEP * STEP; base < seen.last; base += SPAN) {
        const int end = smaller(base + SPAN, (seen.last + STEP - 1) / STEP * STEP);
        if (!mask.look(seen, base, end)) continue;
        for (int from = base; from < end; from += STEP) {
            if (mask.step[(from - base) / STEP] == NONE) continue;  // whatever lies in its scores is masked below
            by_heads<L>(count, Scores<L, Codec>{Codec::keys(k, width, from), width, from - base, scratch});
        }
        const size_t scales = Codec::SCALED ? (size_t)head * store.capacity + base : 0;
        for (int i = 0; i < count; i++) {
            weigh<L, Codec>(scratch.scores + i * SPAN, end - base, mask, store.k_scale + scales, store.v_scale + scales, softcap,
                            scratch.sums + i * width, width, most + i, total + i);
            Kernel<L, Codec>::prepare_weights(scratch.scores + i * SPAN, end - base, scratch.weight_factor + i);
        }
        by_heads<L>(count, Values<L, Codec>{Codec::values(v, width, base), width, mask.runs, scratch});
    }
    for (int i = 0; i < count; i++) memcpy(out + i * ldo, scratch.sums + i * width, store.dim * sizeof(float));
}

template <class L>
void part(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
          float* out, int ldo, float* most, float* total, void* memory) {
    if (store.codec == Codec::F32)
        part_of<L, ReadF32<L>>(store, head, q, ldq, count, scale, softcap, seen, out, ldo, most, total, memory);
    else if (store.codec == Codec::BF16)
        part_of<L, ReadBf16<L>>(store, head, q, ldq, count, scale, softcap, seen, out, ldo, most, total, memory);
    else
        part_of<L, ReadInt8<L>>(store, head, q, ldq, count, scale, softcap, seen, out, ldo, most, total, memory);
}

}  // namespace
}  // namespace orchard
