// Linear kernels written once over a thin layer `V` of vectors, for AVX2, NEON and plain C++. A layer has:
//
//   LANES                       rows in one vector; a vector of bytes holds four columns of that many rows
//   Floats, Ints, Bytes         vectors of float32, int32 and bytes
//   MOST                        rows of activations taken at a time, 2 or 8
//   strips(T)                   how many vectors of rows fit into registers beside T rows of activations
//   zero, zeros, everywhere, load, store, add, multiply, fused (a * b + c), convert (Ints → Floats), round (half to even)
//   halves                      float16 → Floats;  lower, upper: the two bfloat16 of each 32-bit word → Floats
//   store_bytes, total, less    the low bytes of Ints; their sum; a - b * factor
//   bytes, four_bytes           LANES * 4 bytes; the same four bytes in every lane
//   part<BITS>(bytes, j)        the codes at bit j * BITS of every byte; for 8 bits: code - 128, which is signed
//   dot<BITS>(sum, codes, x)    sum + the four products of each lane
//   QUADS                       whether there are `sixteen` (bytes) and `dots` (four times `dot`, each with the next four of them)
//   table                       16 whole numbers of 16 bits, to be looked up by codes
//   Wide, wide_zeros, narrowed  sums of a lane in any number of pieces; they as Ints
//   look_up(sum, table, codes, x)   sum + the four products of each lane: entries of the table times whole numbers of 16 bits
#pragma once
#include <vector>

#include "linear_common.h"

namespace orchard {
namespace {

template <class V>
void quantise(const float* x, int cols, int padded, int group, int8_t* digits, float* scale, float* sum) {
    for (int g = 0; g * group < padded; ++g) {
        const float* from = x + g * group;
        const int count = cols - g * group < group ? cols - g * group : group;
        uint32_t most = 0;
        for (int i = 0; i < count; ++i) {
            const uint32_t bits = bits_of_float(from[i]) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
        const GroupScale found = scale_of(most);
        const typename V::Floats inverse = V::everywhere(found.inverse);
        int32_t total = 0;
        for (int i = 0; i < group; i += V::LANES) {
            int8_t *const to = digits + digit_at(g * group + i), *const rest = to + 32;
            if (found.inverse == 0.0f || i >= count) {
                std::memset(to, 0, V::LANES);
                std::memset(rest, 0, V::LANES);
                continue;
            }
            float last[V::LANES] = {};
            if (i + V::LANES > count) std::memcpy(last, from + i, (size_t)(count - i) * sizeof(float));
            const auto value = V::multiply(V::load(i + V::LANES > count ? last : from + i), inverse);
            const typename V::Ints whole = V::round(value), high = V::round(V::multiply(value, V::everywhere(1.0f / BASE)));
            V::store_bytes(to, high);
            V::store_bytes(rest, V::less(whole, high, BASE));
            total += V::total(whole);
        }
        scale[g] = found.scale;
        sum[g] = found.scale * (float)total;
    }
}

template <class V>
void store_rows(float* y, typename V::Floats sums, int rows, bool add) {
    if (rows >= V::LANES) return V::store(y, add ? V::add(sums, V::load(y)) : sums);
    float last[V::LANES];
    V::store(last, sums);
    for (int r = 0; r < rows; ++r) y[r] = add ? y[r] + last[r] : last[r];
}

// Columns [0, padded) of some rows of digits as whole numbers of 16 bits.
inline const int16_t* whole_numbers(const QuantRows& x, int T, int padded) {
    static thread_local std::vector<int16_t> room;
    if (room.size() < (size_t)T * padded) room.resize((size_t)T * padded);
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < padded; ++c) {
            const int8_t* const digit = x.digits + (size_t)t * x.ldd + digit_at(c);
            room[(size_t)t * padded + c] = (int16_t)(BASE * digit[0] + digit[32]);
        }
    return room.data();
}

// T rows, whose numbers are in `x_whole`. A group of 32 columns is as much as 32 bits add up: 2^15 * 127 * BASE * 32 < 2^31.
template <class V, int BITS, int T>
void palette_q_rows(const Weight& w, int first, int last, const QuantRows& x, const int16_t* x_whole, float* y, int ldy, bool add) {
    constexpr int LANES = V::LANES, PARTS = 8 / BITS;
    const int padded = w.padded_cols();
    const size_t block_bytes = w.block_bytes();
    for (int b = first; b < last; ++b) {
        const uint8_t* const block = w.data + b * block_bytes;
        for (int half = 0; half < 2; ++half) {
            int16_t entries[16] = {};
            const float unit = whole_entries(block + half * 32, 1 << BITS, entries);
            const auto table = V::table(entries);
            for (int row = half * 16; row < half * 16 + 16; row += LANES) {
                typename V::Floats sums[T];
                for (int t = 0; t < T; ++t) sums[t] = V::zero();
                const uint8_t* codes = block + 64 + row * 4;
                for (int c = 0; c < padded; c += 32) {
                    typename V::Wide dots[T];
                    for (int t = 0; t < T; ++t) dots[t] = V::wide_zeros();
                    for (int chunk = 0; chunk < BITS; ++chunk, codes += 128) {
                        const typename V::Bytes word = V::bytes(codes);
#pragma GCC unroll 4
                        for (int j = 0; j < PARTS; ++j) {
                            const typename V::Bytes code = V::template part<BITS>(word, j);
                            const int column = c + (chunk * PARTS + j) * 4;
#pragma GCC unroll 2
                            for (int t = 0; t < T; ++t) V::look_up(dots[t], table, code, x_whole + (size_t)t * padded + column);
                        }
                    }
                    for (int t = 0; t < T; ++t)
                        sums[t] = V::fused(V::convert(V::narrowed(dots[t])), V::everywhere(x.scale[t * x.ldg + c / 32]), sums[t]);
                }
                for (int t = 0; t < T; ++t)
                    store_rows<V>(y + (size_t)t * ldy + b * 32 + row, V::multiply(sums[t], V::everywhere(unit)), w.rows - b * 32 - row, add);
            }
        }
    }
}

template <class V, int BITS>
void palette_q_any(const Weight& w, int first, int last, QuantRows x, int T, float* y, int ldy, bool add) {
    const int padded = w.padded_cols();
    const int16_t* whole = whole_numbers(x, T, padded);
    for (; T > 1; T -= 2, y += (size_t)2 * ldy, whole += 2 * padded) {
        palette_q_rows<V, BITS, 2>(w, first, last, x, whole, y, ldy, add);
        x = x.from(2);
    }
    if (T) palette_q_rows<V, BITS, 1>(w, first, last, x, whole, y, ldy, add);
}

template <class V>
void palette_q(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    if (w.kind == Kind::P4) return palette_q_any<V, 4>(w, first, last, x, T, y, ldy, add);
    palette_q_any<V, 2>(w, first, last, x, T, y, ldy, add);
}

// The products of a group's codes with the digits from `column` on: D rows of digits, two of each row of activations. The same four
// digits go into every lane.
template <class V, int BITS, int D, int STRIPS>
inline void dots_of_words(const uint8_t* codes, int chunks, const QuantRows& x, int column, typename V::Ints (&dots)[D][STRIPS]) {
    constexpr int PARTS = 8 / BITS;
    for (int c = 0; c < chunks; ++c) {
        typename V::Bytes word[STRIPS];
        for (int s = 0; s < STRIPS; ++s) word[s] = V::bytes(codes + c * 128 + s * V::LANES * 4);
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; ++j) {
            typename V::Bytes code[STRIPS];
            for (int s = 0; s < STRIPS; ++s) code[s] = V::template part<BITS>(word[s], j);
#pragma GCC unroll 16
            for (int d = 0; d < D; ++d) {
                const int8_t* digits = x.digits + (size_t)(d / 2) * x.ldd + d % 2 * 32;
                const auto some = V::four_bytes(digits + digit_at(column + (c * PARTS + j) * 4));
#pragma GCC unroll 8
                for (int s = 0; s < STRIPS; ++s) dots[d][s] = V::template dot<BITS>(dots[d][s], code[s], some);
            }
        }
    }
}

// The same where one instruction takes four digits out of sixteen for every lane: digits are loaded sixteen at a time.
template <class V, int BITS, int D, int STRIPS>
inline void dots_of_quads(const uint8_t* codes, int chunks, const QuantRows& x, int column, typename V::Ints (&dots)[D][STRIPS]) {
    constexpr int PARTS = 8 / BITS, AT_ONCE = 4 / PARTS;  // chunks that hold sixteen columns
    for (int c = 0; c < chunks; c += AT_ONCE) {
        typename V::Bytes code[4][STRIPS];
        for (int s = 0; s < STRIPS; ++s)
#pragma GCC unroll 4
            for (int chunk = 0; chunk < AT_ONCE; ++chunk) {
                const typename V::Bytes word = V::bytes(codes + (c + chunk) * 128 + s * V::LANES * 4);
#pragma GCC unroll 4
                for (int j = 0; j < PARTS; ++j) code[chunk * PARTS + j][s] = V::template part<BITS>(word, j);
            }
#pragma GCC unroll 16
        for (int d = 0; d < D; ++d) {
            const int8_t* digits = x.digits + (size_t)(d / 2) * x.ldd + d % 2 * 32;
            const typename V::Bytes some = V::sixteen(digits + digit_at(column + c * PARTS * 4));
            for (int s = 0; s < STRIPS; ++s) dots[d][s] = V::dots(dots[d][s], code[0][s], code[1][s], code[2][s], code[3][s], some);
        }
    }
}

template <class V, int BITS, bool MINIMUM, int T>
void linear_q_rows(const Weight& w, int first, int last, const QuantRows& x, float* y, int ldy, bool add) {
    constexpr int LANES = V::LANES, STRIPS = V::strips(2 * T), HEADER = MINIMUM ? 128 : 64;
    constexpr bool ZERO = !MINIMUM || BITS == 8;  // whether there is anything to take off the codes
    const int groups = w.padded_cols() / w.group, chunks = w.group * BITS / 32;
    const size_t group_bytes = w.group_bytes(), block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    // 8-bit codes come out of `part` with 128 taken off already.
    const typename V::Floats zero = V::everywhere((BITS == 8 ? 128.0f : 0.0f) - zero_of(w.kind, MINIMUM));
    for (int b = first; b < last; ++b) {
        for (int strip = 0; strip < 32 / LANES; strip += STRIPS) {
            const uint8_t* at = w.data + b * block_bytes;
            typename V::Floats sums[T][STRIPS];
            for (int t = 0; t < T; ++t)
                for (int s = 0; s < STRIPS; ++s) sums[t][s] = V::zero();
            for (int g = 0; g < groups; ++g, at += group_bytes) {
                if (strip == 0 && at + AHEAD + group_bytes <= end)
                    for (size_t line = 0; line < group_bytes; line += 64) __builtin_prefetch(at + AHEAD + line);
                typename V::Ints dots[2 * T][STRIPS];  // both digits of each row
                for (int d = 0; d < 2 * T; ++d)
                    for (int s = 0; s < STRIPS; ++s) dots[d][s] = V::zeros();
                if constexpr (V::QUADS)
                    dots_of_quads<V, BITS, 2 * T, STRIPS>(at + HEADER + strip * LANES * 4, chunks, x, g * w.group, dots);
                else
                    dots_of_words<V, BITS, 2 * T, STRIPS>(at + HEADER + strip * LANES * 4, chunks, x, g * w.group, dots);
#pragma GCC unroll 8
                for (int s = 0; s < STRIPS; ++s) {
                    const auto scale = V::halves(at + (strip + s) * LANES * 2);
                    const auto minimum = MINIMUM ? V::halves(at + 64 + (strip + s) * LANES * 2) : V::zero();
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const auto x_scale = V::everywhere(x.scale[t * x.ldg + g]), x_sum = V::everywhere(x.sum[t * x.ldg + g]);
                        const auto dot = V::convert(V::less(dots[2 * t + 1][s], dots[2 * t][s], -BASE));  // low + BASE * high
                        const auto part = ZERO ? V::fused(dot, x_scale, V::multiply(zero, x_sum)) : V::multiply(dot, x_scale);
                        sums[t][s] = V::fused(part, scale, sums[t][s]);
                        if (MINIMUM) sums[t][s] = V::fused(minimum, x_sum, sums[t][s]);
                    }
                }
            }
            for (int t = 0; t < T; ++t)
                for (int s = 0; s < STRIPS; ++s) {
                    const int row = b * 32 + (strip + s) * LANES;
                    store_rows<V>(y + (size_t)t * ldy + row, sums[t][s], w.rows - row, add);
                }
        }
    }
}

template <class V, Kind KIND, int T>
void linear_f_rows(const Weight& w, int first, int last, const float* x, int ldx, float* y, int ldy, bool add) {
    constexpr bool BFLOAT = KIND == Kind::BF16, HALF = KIND == Kind::F16;
    constexpr int LANES = V::LANES, STRIPS = V::strips(T), COLUMNS = BFLOAT ? 2 : 1, BYTES = HALF ? 2 : 4;
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    for (int b = first; b < last; ++b) {
        const int lanes = HALF ? w.lanes(b) : 32, step = HALF ? lanes * 2 : 128;
        for (int strip = 0; strip < 32 / LANES; strip += STRIPS) {
            const uint8_t* at = w.data + b * block_bytes;
            typename V::Floats sums[T][STRIPS];
            for (int t = 0; t < T; ++t)
                for (int s = 0; s < STRIPS; ++s) sums[t][s] = V::zero();
            for (int c = 0; c < w.cols; c += COLUMNS, at += step) {
                if (strip == 0 && at + AHEAD + 128 <= end) {
                    __builtin_prefetch(at + AHEAD);
                    __builtin_prefetch(at + AHEAD + 64);
                }
#pragma GCC unroll 8
                for (int s = 0; s < STRIPS; ++s) {
                    if (HALF && (strip + s) * LANES >= lanes) break;
                    const uint8_t* const from = at + (strip + s) * LANES * BYTES;
                    const auto column = HALF ? V::halves(from) : BFLOAT ? V::lower(from) : V::load((const float*)from);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t)
                        sums[t][s] = V::fused(column, V::everywhere(x[(size_t)t * ldx + c]), sums[t][s]);
                    if (!BFLOAT || c + 1 >= w.cols) continue;
                    const auto second = V::upper(from);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t)
                        sums[t][s] = V::fused(second, V::everywhere(x[(size_t)t * ldx + c + 1]), sums[t][s]);
                }
            }
            for (int t = 0; t < T; ++t)
                for (int s = 0; s < STRIPS; ++s) {
                    const int row = b * 32 + (strip + s) * LANES;
                    store_rows<V>(y + (size_t)t * ldy + row, sums[t][s], w.rows - row, add);
                }
        }
    }
}

template <class V, int BITS, bool MINIMUM>
void linear_q_any(const Weight& w, int first, int last, QuantRows x, int T, float* y, int ldy, bool add) {
    for (; T > V::MOST; T -= V::MOST, y += (size_t)V::MOST * ldy) {
        linear_q_rows<V, BITS, MINIMUM, V::MOST>(w, first, last, x, y, ldy, add);
        x = x.from(V::MOST);
    }
    if (T == 1) return linear_q_rows<V, BITS, MINIMUM, 1>(w, first, last, x, y, ldy, add);
    if (T == 2) return linear_q_rows<V, BITS, MINIMUM, 2>(w, first, last, x, y, ldy, add);
    if constexpr (V::MOST == 8) {
        if (T == 3) return linear_q_rows<V, BITS, MINIMUM, 3>(w, first, last, x, y, ldy, add);
        if (T == 4) return linear_q_rows<V, BITS, MINIMUM, 4>(w, first, last, x, y, ldy, add);
        if (T == 5) return linear_q_rows<V, BITS, MINIMUM, 5>(w, first, last, x, y, ldy, add);
        if (T == 6) return linear_q_rows<V, BITS, MINIMUM, 6>(w, first, last, x, y, ldy, add);
        if (T == 7) return linear_q_rows<V, BITS, MINIMUM, 7>(w, first, last, x, y, ldy, add);
        linear_q_rows<V, BITS, MINIMUM, 8>(w, first, last, x, y, ldy, add);
    }
}

template <class V>
void linear_q(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    if (w.palette()) return palette_q<V>(w, first, last, x, T, y, ldy, add);
    if (w.kind == Kind::Q8)
        return w.minimum ? linear_q_any<V, 8, true>(w, first, last, x, T, y, ldy, add)
                         : linear_q_any<V, 8, false>(w, first, last, x, T, y, ldy, add);
    if (w.kind == Kind::Q4)
        return w.minimum ? linear_q_any<V, 4, true>(w, first, last, x, T, y, ldy, add)
                         : linear_q_any<V, 4, false>(w, first, last, x, T, y, ldy, add);
    return w.minimum ? linear_q_any<V, 2, true>(w, first, last, x, T, y, ldy, add)
                     : linear_q_any<V, 2, false>(w, first, last, x, T, y, ldy, add);
}

template <class V, Kind KIND>
void linear_f_any(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    for (; T > V::MOST; T -= V::MOST, x += (size_t)V::MOST * ldx, y += (size_t)V::MOST * ldy)
        linear_f_rows<V, KIND, V::MOST>(w, first, last, x, ldx, y, ldy, add);
    if (T == 1) return linear_f_rows<V, KIND, 1>(w, first, last, x, ldx, y, ldy, add);
    if (T == 2) return linear_f_rows<V, KIND, 2>(w, first, last, x, ldx, y, ldy, add);
    if constexpr (V::MOST == 8) {
        if (T == 3) return linear_f_rows<V, KIND, 3>(w, first, last, x, ldx, y, ldy, add);
        if (T == 4) return linear_f_rows<V, KIND, 4>(w, first, last, x, ldx, y, ldy, add);
        if (T == 5) return linear_f_rows<V, KIND, 5>(w, first, last, x, ldx, y, ldy, add);
        if (T == 6) return linear_f_rows<V, KIND, 6>(w, first, last, x, ldx, y, ldy, add);
        if (T == 7) return linear_f_rows<V, KIND, 7>(w, first, last, x, ldx, y, ldy, add);
        linear_f_rows<V, KIND, 8>(w, first, last, x, ldx, y, ldy, add);
    }
}

// A block of 32 rows of BLOCKS in the order of F32: levels are multiplied with their scales once for all digits that look them up.
inline void block_of_floats(const Weight& w, int block, float* to) {
    const uint8_t* group = w.data + block * w.block_bytes();
    for (int from = 0; from < w.cols; from += w.group, group += 64 + 16 * w.group)
        for (int c = 0; c < w.group && from + c < w.cols; c += BLOCK_SIDE) {
            float values[8][16];
            for (int i = 0; i < 8; ++i)
                for (int digit = 0; digit < 16; ++digit) values[i][digit] = block_value(group[c / BLOCK_SIDE * 8 + i], digit);
            const int real = w.cols - from - c < BLOCK_SIDE ? w.cols - from - c : BLOCK_SIDE;
            for (int lane = 0; lane < 32; ++lane) {
                const float* const value = values[(block * 32 + lane) / BLOCK_SIDE - block * 32 / BLOCK_SIDE];
                uint32_t words[2];  // six digits lie in one or two of them
                for (int k = 0; k < 2; ++k) std::memcpy(words + k, group + 64 + (c + k * (BLOCK_SIDE - 1)) / 8 * 128 + lane * 4, 4);
                uint64_t digits = c % 8 + BLOCK_SIDE > 8 ? (uint64_t)words[1] << 32 | words[0] : words[0];
                digits >>= c % 8 * 4;
                for (int i = 0; i < real; ++i, digits >>= 4) to[(size_t)(from + c + i) * 32 + lane] = value[digits & 15];
            }
        }
}

// Blocks by way of 32 rows in float32 at a time.
template <class V>
void blocks_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    static thread_local std::vector<float> room;
    room.resize((size_t)32 * w.cols);
    for (int b = first; b < last; ++b) {
        Weight panel;
        panel.kind = Kind::F32, panel.rows = w.rows - b * 32 < 32 ? w.rows - b * 32 : 32, panel.cols = w.cols;
        panel.data = (const uint8_t*)room.data();
        block_of_floats(w, b, room.data());
        linear_f_any<V, Kind::F32>(panel, 0, 1, x, ldx, T, y + b * 32, ldy, add);
    }
}

template <class V>
void linear_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    if (w.kind == Kind::BF16) return linear_f_any<V, Kind::BF16>(w, first, last, x, ldx, T, y, ldy, add);
    if (w.kind == Kind::BLOCKS) return blocks_f<V>(w, first, last, x, ldx, T, y, ldy, add);
    if (w.kind == Kind::F16) return linear_f_any<V, Kind::F16>(w, first, last, x, ldx, T, y, ldy, add);
    return linear_f_any<V, Kind::F32>(w, first, last, x, ldx, T, y, ldy, add);
}

}  // namespace
}  // namespace orchard
