// Attention straight from the codes of keys and values (vq.h), over the same thin vector layer as attention_template.h, which comes
// first. A layer has besides: a type S of 2 W whole numbers of 16 bits, with load_short, add_short, sub_short and widen.
//
// Scores: a block of slots is summed up from codewords in whole numbers, made real, rotated relative to the block's first slot and
// multiplied with all queries that share the key head; the queries are rotated back from block to block instead. Values: weights are
// added up by code, [round][word], and only then multiplied with the codewords; where there are few slots, values are made one by one.
#pragma once
#include "attention_template.h"
#include "vq.h"

namespace orchard {
namespace {

typedef float Four __attribute__((vector_size(16), aligned(4)));

template <class L>
struct Vq {
    typedef typename L::F F;
    typedef typename L::S S;
    static constexpr int W = L::W, CHUNK = 32;
    static constexpr int SHORTS = CHUNK / (2 * W);  // vectors of whole numbers in one half of a chunk of channels
    static_assert(SHORTS >= 1, "a vector holds at most 32 whole numbers");

    const Store& store;
    const VqBooks& b;
    const int head, lanes, width;

    Vq(const Store& s, int h) : store(s), b(*s.books), head(h), lanes(b.lanes), width(2 * b.lanes) {}

    const uint8_t* key(int slot) const { return store.k + ((size_t)head * store.capacity + slot) * b.key_bytes(); }
    const uint8_t* value(int slot) const { return store.v + ((size_t)head * store.capacity + slot) * b.value_bytes(); }
    const float* exact_key(int slot) const { return store.exact + ((size_t)head * b.exact + slot) * b.dim; }
    const float* exact_value(int slot) const { return store.exact + ((size_t)(b.heads + head) * b.exact + slot) * b.dim; }

    // x (real and imaginary parts) times the turn of one position, in place where `out` is x.
    static void turn(F& x, F& y, const float* cosine, const float* sine) {
        F c = L::load(cosine), s = L::load(sine), turned = L::sub(L::mul(x, c), L::mul(y, s));
        y = L::fma(x, s, L::mul(y, c));
        x = turned;
    }

    // Keys in units, rotated by `turns` (cosines, then sines, of each slot; null: not at all): rows [2][lanes]. LANES: known lanes, or 0.
    template <int LANES>
    void coded_rows(int first, int last, const float* turns, float* rows) const {
        const int lanes = LANES ? LANES : this->lanes, rounds = b.key_rounds, bits = b.key_bits, bytes = b.key_bytes();
        const size_t word = (size_t)2 * lanes, round_size = b.key_words * word;
        const int16_t* table = b.steps + (size_t)head * rounds * round_size;
        const float* offset = b.offset.data() + (size_t)head * word;
        const uint8_t* codes = key(first);
        uint8_t all_indices[VQ_BLOCK][2 * VQ_MOST_ROUNDS];
        vq_indices(codes, bytes, last - first, bits, 2 * rounds, all_indices[0], sizeof all_indices[0]);
        for (int slot = first; slot < last; slot++, codes += bytes, rows += word) {
            const uint8_t* indices = all_indices[slot - first];
            const F prescale = L::set(vq_prescale(codes + bytes - 2));
            for (int from = 0; from < lanes; from += CHUNK) {
                S x[SHORTS], y[SHORTS];
                const int16_t *first_word = table + indices[0] * word + from, *second_word = table + indices[1] * word + from;
                for (int i = 0; i < SHORTS; i++) {
                    x[i] = L::sub_short(L::load_short(first_word + i * 2 * W), L::load_short(second_word + lanes + i * 2 * W));
                    y[i] = L::add_short(L::load_short(first_word + lanes + i * 2 * W), L::load_short(second_word + i * 2 * W));
                }
                const int16_t* round = table + from;
                for (int r = 1; r < rounds; r++) {
                    round += round_size;
                    first_word = round + indices[2 * r] * word, second_word = round + indices[2 * r + 1] * word;
                    for (int i = 0; i < SHORTS; i++) {
                        x[i] = L::add_short(x[i], L::load_short(first_word + i * 2 * W));
                        y[i] = L::add_short(y[i], L::load_short(first_word + lanes + i * 2 * W));
                        x[i] = L::sub_short(x[i], L::load_short(second_word + lanes + i * 2 * W));
                        y[i] = L::add_short(y[i], L::load_short(second_word + i * 2 * W));
                    }
                }
                for (int i = 0; i < SHORTS; i++) {
                    F re[2], im[2];
                    L::widen(x[i], re[0], re[1]), L::widen(y[i], im[0], im[1]);
                    for (int side = 0; side < 2; side++) {
                        const int at = from + (2 * i + side) * W;
                        F a = L::fma(re[side], prescale, L::load(offset + at)), c = L::fma(im[side], prescale, L::load(offset + lanes + at));
                        if (turns) turn(a, c, turns + at, turns + lanes + at);
                        L::store(rows + at, a), L::store(rows + lanes + at, c);
                    }
                }
            }
            if (turns) turns += word;
        }
    }

    void exact_row(int slot, const float* turns, float* row) const {
        const float *k = exact_key(slot), *inverse = b.inverse.data() + (size_t)head * width;
        const int half = b.dim / 2;
        for (int p = 0; p < lanes; p++) {
            row[p] = p < half ? k[p] * inverse[p] : 0;
            row[lanes + p] = p < half ? k[half + p] * inverse[p] : 0;
        }
        for (int at = 0; turns && at < lanes; at += W) {
            F x = L::load(row + at), y = L::load(row + lanes + at);
            turn(x, y, turns + at, turns + lanes + at);
            L::store(row + at, x), L::store(row + lanes + at, y);
        }
    }

    // Keys of slots [first, last), which lie in the block that begins at `base`. turns: of that block, a row of 2 lanes per slot.
    void key_rows(int base, int first, int last, const float* turns, float* rows) const {
        const int exact = smaller(larger(b.exact, first), last);
        for (int slot = first; slot < exact; slot++) {
            const size_t at = (size_t)(slot - base) * width;
            exact_row(slot, turns ? turns + at : nullptr, rows + at);
        }
        const size_t at = (size_t)(exact - base) * width;
        if (lanes == CHUNK) coded_rows<CHUNK>(exact, last, turns ? turns + at : nullptr, rows + at);
        else coded_rows<0>(exact, last, turns ? turns + at : nullptr, rows + at);
    }

    // A query (rotated, not scaled) in units of the keys: [2][lanes].
    void query(const float* q, float scale, float* out) const {
        const float* unit = b.unit.data() + (size_t)head * width;
        const int half = b.dim / 2;
        scale *= b.gain;
        for (int p = 0; p < lanes; p++) {
            out[p] = p < half ? q[p] * scale * unit[p] : 0;
            out[lanes + p] = p < half ? q[half + p] * scale * unit[p] : 0;
        }
    }

    // A query times the turns of a position, backwards.
    void turn_back(float* q, const float* turns) const {
        for (int at = 0; at < lanes; at += W) {
            F x = L::load(q + at), y = L::load(q + lanes + at), c = L::load(turns + at), s = L::load(turns + lanes + at);
            L::store(q + at, L::fma(y, s, L::mul(x, c)));
            L::store(q + lanes + at, L::sub(L::mul(y, c), L::mul(x, s)));
        }
    }

    // Cosines and sines of one position: [2][lanes].
    void turns_at(int position, float* out) const {
        for (int p = 0; p < lanes; p++) {
            const float angle = (float)position * b.frequencies[p];
            out[p] = cosf(angle), out[lanes + p] = sinf(angle);
        }
    }

    // out[r * stride + i] = queries[r] · rows[i] for i < 4 * fours.
    struct Dots {
        const float *q, *rows;
        int width, fours, stride;
        float* out;
        template <int R>
        void run(int first) const {
            const float* query = q + (size_t)first * width;
            for (int four = 0; four < fours; four++) {
                const float* row = rows + (size_t)four * 4 * width;
                F sum[R][4];
                for (int r = 0; r < R; r++)
                    for (int i = 0; i < 4; i++) sum[r][i] = L::set(0);
                for (int c = 0; c < width; c += W) {
                    F x[4];
                    for (int i = 0; i < 4; i++) x[i] = L::load(row + i * width + c);
                    for (int r = 0; r < R; r++) {
                        const F y = L::load(query + r * width + c);
                        for (int i = 0; i < 4; i++) sum[r][i] = L::fma(x[i], y, sum[r][i]);
                    }
                }
                for (int r = 0; r < R; r++) L::sum_four(sum[r], out + (size_t)(first + r) * stride + four * 4);
            }
        }
    };

    // A value, as columns; without its offset where it is made of codes.
    void value_row(int slot, float* row) const {
        uint8_t indices[VQ_MOST_ROUNDS];
        const uint8_t* codes = value(slot);
        vq_indices(codes, 0, 1, b.value_bits, b.value_rounds, indices, 0);
        const F prescale = L::set(vq_prescale(codes + b.value_bytes() - 2));
        const size_t round = (size_t)b.value_words * b.columns;
        const float* table = b.value_rows + (size_t)head * b.value_rounds * round;
        for (int c = 0; c < b.columns; c += 2 * W) {
            F low = L::set(0), high = L::set(0);
            for (int r = 0; r < b.value_rounds; r++) {
                const float* word = table + r * round + (size_t)indices[r] * b.columns + c;
                low = L::add(low, L::load(word)), high = L::add(high, L::load(word + W));
            }
            L::store(row + c, L::mul(low, prescale)), L::store(row + c + W, L::mul(high, prescale));
        }
    }

    // sums[r][c] += weights[i * 4 + r] * rows[i][c] for R heads and `count` rows.
    struct Products {
        const float *weights, *rows;
        int count, columns;
        float* sums;
        template <int R>
        void run(int first) const {
            constexpr int C = L::COLUMNS;
            int column = 0;
            for (; columns - column >= C * W; column += C * W) some<R, C>(weights + first, sums + (size_t)first * columns + column, column);
            for (; column < columns; column += 2 * W) some<R, 2>(weights + first, sums + (size_t)first * columns + column, column);
        }
        template <int R, int C>
        void some(const float* weight, float* to, int column) const {
            F sum[R][C];
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) sum[r][c] = L::load(to + r * columns + c * W);
            const float* row = rows + column;
            for (int i = 0; i < count; i++, row += columns, weight += 4) {
                F x[C];
                for (int c = 0; c < C; c++) x[c] = L::load(row + c * W);
                for (int r = 0; r < R; r++)
                    for (int c = 0; c < C; c++) sum[r][c] = L::fma(x[c], L::set(weight[r]), sum[r][c]);
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) L::store(to + r * columns + c * W, sum[r][c]);
        }
    };

    // `weights` [slots][4] of slots first .. last (all made of codes) times their values, for up to four heads: sums [4][columns].
    void values_by_code(int first, int last, const float* weights, int heads, float* counts, float* sums) const {
        const int words = b.value_words, rounds = b.value_rounds;
        memset(counts, 0, sizeof(float) * 4 * words * rounds);
        const int bits = b.value_bits, bytes = b.value_bytes();
        const uint8_t* codes = value(first);
        uint8_t indices[VQ_BLOCK][VQ_MOST_ROUNDS];
        for (int slot = first; slot < last; slot += VQ_BLOCK) {
            const int some = smaller(last - slot, VQ_BLOCK);
            vq_indices(codes, bytes, some, bits, rounds, indices[0], sizeof indices[0]);
            for (int i = 0; i < some; i++, weights += 4, codes += bytes) {
                const Four weight = *(const Four*)weights * vq_prescale(codes + bytes - 2);
                float* at = counts;
                for (int r = 0; r < rounds; r++, at += 4 * words) *(Four*)(at + 4 * indices[i][r]) += weight;
            }
        }
        const float* table = b.value_rows + (size_t)head * rounds * words * b.columns;
        by_heads<L>(heads, Products{counts, table, rounds * words, b.columns, sums});
    }

    void values_one_by_one(int first, int last, const float* weights, int heads, float* row, float* sums) const {
        for (int slot = first; slot < last; slot++, weights += 4) {
            value_row(slot, row);
            by_heads<L>(heads, Products{weights, row, 1, b.columns, sums});
        }
    }
};

// Memory for a call, in pieces that begin at multiples of 64 bytes.
struct VqScratch {
    uint8_t* at;
    explicit VqScratch(void* memory) : at((uint8_t*)(((uintptr_t)memory + 63) / 64 * 64)) {}
    float* floats(size_t count) {
        float* found = (float*)at;
        at += (count * sizeof(float) + 63) / 64 * 64;
        return found;
    }
};

inline int vq_stride(int slots) { return (slots + 2 * VQ_BLOCK) / VQ_BLOCK * VQ_BLOCK; }

size_t vq_scratch_bytes(const Store& store, int slots, int count) {
    const VqBooks& b = *store.books;
    const size_t stride = vq_stride(slots + VQ_BLOCK), width = 2 * b.lanes;  // the first block may begin before the first slot
    const size_t floats = count * (width + stride) + (VQ_BLOCK + 1) * width + 4 * stride + 5 * (size_t)b.columns + 4 * b.value_rounds * b.value_words;
    return floats * sizeof(float) + 64 * 10;
}

template <class L>
void vq_part(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
             float* out, int ldo, float* most, float* total, void* memory) {
    typedef typename L::F F;
    const Vq<L> vq(store, head);
    const VqBooks& b = vq.b;
    if (seen.first >= seen.last) {
        for (int i = 0; i < count; i++) {
            most[i] = -INFINITY, total[i] = 0;
            memset(out + (size_t)i * ldo, 0, sizeof(float) * b.dim);
        }
        return;
    }
    const int start = seen.first / VQ_BLOCK * VQ_BLOCK, stride = vq_stride(seen.last - start), columns = b.columns;
    VqScratch scratch(memory);
    float *queries = scratch.floats((size_t)count * vq.width), *scores = scratch.floats((size_t)count * stride);
    float *rows = scratch.floats((size_t)VQ_BLOCK * vq.width), *angles = scratch.floats(vq.width), *weights = scratch.floats((size_t)4 * stride);
    float *sums = scratch.floats((size_t)4 * columns), *row = scratch.floats(columns);
    float* counts = scratch.floats((size_t)4 * b.value_rounds * b.value_words);
    const float* turns = b.turns.empty() ? nullptr : b.turns.data();
    for (int i = 0; i < count; i++) vq.query(q + (size_t)i * ldq, scale, queries + (size_t)i * vq.width);
    if (turns) {
        vq.turns_at(start, angles);
        for (int i = 0; i < count; i++) vq.turn_back(queries + (size_t)i * vq.width, angles);
    }
    for (int base = start; base < seen.last; base += VQ_BLOCK) {
        const int first = larger(base, seen.first), last = smaller(base + VQ_BLOCK, seen.last);
        if (base > start && turns)
            for (int i = 0; i < count; i++) vq.turn_back(queries + (size_t)i * vq.width, turns + (size_t)VQ_BLOCK * vq.width);
        vq.key_rows(base, first, last, turns, rows);
        const int skip = (first - base) / 4;  // whole fours before the first slot that is seen
        typename Vq<L>::Dots dots{queries, rows + (size_t)skip * 4 * vq.width, vq.width, (last - base + 3) / 4 - skip, stride,
                                  scores + (base - start) + skip * 4};
        by_heads<L>(count, dots);
    }
    const int begin = seen.first - start, end = seen.last - start, padded = (end + VQ_BLOCK - 1) / VQ_BLOCK * VQ_BLOCK;
    for (int i = 0; i < count; i++) {
        float* own = scores + (size_t)i * stride;
        for (int s = 0; s < begin; s++) own[s] = 0;  // whatever lies there
        for (int s = end; s < padded; s++) own[s] = 0;
        for (int s = 0; softcap > 0 && s < padded; s += L::W) L::store(own + s, capped<L>(L::load(own + s), softcap));
        for (int s = 0; s < begin; s++) own[s] = -INFINITY;
        for (int s = end; s < padded; s++) own[s] = -INFINITY;
        F highest = L::set(-INFINITY), sum = L::set(0);
        for (int s = 0; s < padded; s += L::W) highest = L::max(highest, L::load(own + s));
        most[i] = L::largest(highest);
        for (int s = 0; s < padded; s += L::W) {
            F e = exponential<L>(L::sub(L::load(own + s), L::set(most[i])));
            sum = L::add(sum, e);
            L::store(own + s, e);
        }
        total[i] = L::sum(sum);
    }
    const int exact = smaller(larger(b.exact, seen.first), seen.last), coded = seen.last - exact;  // [first, exact) are kept as they came
    for (int from = 0; from < count; from += 4) {
        const int heads = smaller(count - from, 4);
        memset(sums, 0, sizeof(float) * 4 * columns);
        float mass[4] = {};  // of the slots that are made of codes
        for (int r = 0; r < 4; r++) {
            const float* own = scores + (size_t)(from + (r < heads ? r : 0)) * stride - start;
            for (int s = 0; s < coded; s++) weights[4 * s + r] = r < heads ? own[exact + s] : 0;
            mass[r] = r < heads ? total[from + r] : 0;
            for (int slot = seen.first; r < heads && slot < exact; slot++) mass[r] -= own[slot];
        }
        // What a slot costs by itself, and what the sum over all codes costs.
        if (coded > b.value_words * heads) vq.values_by_code(exact, seen.last, weights, heads, counts, sums);
        else vq.values_one_by_one(exact, seen.last, weights, heads, row, sums);
        for (int r = 0; r < heads; r++) {
            const float *offset = b.value_offset + (size_t)head * b.dim, *own = scores + (size_t)(from + r) * stride;
            float* result = out + (size_t)(from + r) * ldo;
            for (int c = 0; c < b.dim; c++) result[c] = sums[r * columns + c] + mass[r] * offset[c];
            for (int slot = seen.first; slot < exact; slot++) {
                const float *v = vq.exact_value(slot), weight = own[slot - start];
                for (int c = 0; c < b.dim; c++) result[c] += weight * v[c];
            }
        }
    }
}

}  // namespace
}  // namespace orchard
