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
#pragma once
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

template <class V, int BITS, bool MINIMUM, int T>
void linear_q_rows(const Weight& w, int first, int last, const QuantRows& x, float* y, int ldy, bool add) {
    constexpr int LANES = V::LANES, STRIPS = V::strips(2 * T), PARTS = 8 / BITS, HEADER = MINIMUM ? 128 : 64;
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
                for (int c = 0; c < chunks; ++c) {
                    typename V::Bytes word[STRIPS];
                    for (int s = 0; s < STRIPS; ++s) word[s] = V::bytes(at + HEADER + c * 128 + (strip + s) * LANES * 4);
#pragma GCC unroll 4
                    for (int j = 0; j < PARTS; ++j) {
                        typename V::Bytes code[STRIPS];
                        for (int s = 0; s < STRIPS; ++s) code[s] = V::template part<BITS>(word[s], j);
#pragma GCC unroll 16
                        for (int d = 0; d < 2 * T; ++d) {
                            const int8_t* digits = x.digits + (size_t)(d / 2) * x.ldd + d % 2 * 32;
                            const auto some = V::four_bytes(digits + digit_at(g * w.group + (c * PARTS + j) * 4));
#pragma GCC unroll 8
                            for (int s = 0; s < STRIPS; ++s) dots[d][s] = V::template dot<BITS>(dots[d][s], code[s], some);
                        }
                    }
                }
#pragma GCC unroll 8
                for (int s = 0; s < STRIPS; ++s) {
                    const auto scale = V::halves(at + (strip + s) * LANES * 2);
                    const auto minimum = MINIMUM ? V::halves(at + 64 + (strip + s) * LANES * 2) : V::zero();
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const auto x_scale = V::everywhere(x.scale[t * x.ldg + g]), x_sum = V::everywhere(x.sum[t * x.ldg + g]);
                        const auto high = V::convert(dots[2 * t][s]), low = V::convert(dots[2 * t + 1][s]);
                        const auto dot = V::fused(high, V::everywhere(BASE), low);
                        const auto part = V::fused(dot, x_scale, V::multiply(zero, x_sum));
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

template <class V, bool BFLOAT, int T>
void linear_f_rows(const Weight& w, int first, int last, const float* x, int ldx, float* y, int ldy, bool add) {
    constexpr int LANES = V::LANES, STRIPS = V::strips(T), COLUMNS = BFLOAT ? 2 : 1;
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    for (int b = first; b < last; ++b) {
        for (int strip = 0; strip < 32 / LANES; strip += STRIPS) {
            const uint8_t* at = w.data + b * block_bytes;
            typename V::Floats sums[T][STRIPS];
            for (int t = 0; t < T; ++t)
                for (int s = 0; s < STRIPS; ++s) sums[t][s] = V::zero();
            for (int c = 0; c < w.cols; c += COLUMNS, at += 128) {
                if (strip == 0 && at + AHEAD + 128 <= end) {
                    __builtin_prefetch(at + AHEAD);
                    __builtin_prefetch(at + AHEAD + 64);
                }
#pragma GCC unroll 8
                for (int s = 0; s < STRIPS; ++s) {
                    const uint8_t* const from = at + (strip + s) * LANES * 4;
                    const auto column = BFLOAT ? V::lower(from) : V::load((const float*)from);
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
    if (w.kind == Kind::Q8)
        return w.minimum ? linear_q_any<V, 8, true>(w, first, last, x, T, y, ldy, add)
                         : linear_q_any<V, 8, false>(w, first, last, x, T, y, ldy, add);
    if (w.kind == Kind::Q4)
        return w.minimum ? linear_q_any<V, 4, true>(w, first, last, x, T, y, ldy, add)
                         : linear_q_any<V, 4, false>(w, first, last, x, T, y, ldy, add);
    return w.minimum ? linear_q_any<V, 2, true>(w, first, last, x, T, y, ldy, add)
                     : linear_q_any<V, 2, false>(w, first, last, x, T, y, ldy, add);
}

template <class V, bool BFLOAT>
void linear_f_any(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    for (; T > V::MOST; T -= V::MOST, x += (size_t)V::MOST * ldx, y += (size_t)V::MOST * ldy)
        linear_f_rows<V, BFLOAT, V::MOST>(w, first, last, x, ldx, y, ldy, add);
    if (T == 1) return linear_f_rows<V, BFLOAT, 1>(w, first, last, x, ldx, y, ldy, add);
    if (T == 2) return linear_f_rows<V, BFLOAT, 2>(w, first, last, x, ldx, y, ldy, add);
    if constexpr (V::MOST == 8) {
        if (T == 3) return linear_f_rows<V, BFLOAT, 3>(w, first, last, x, ldx, y, ldy, add);
        if (T == 4) return linear_f_rows<V, BFLOAT, 4>(w, first, last, x, ldx, y, ldy, add);
        if (T == 5) return linear_f_rows<V, BFLOAT, 5>(w, first, last, x, ldx, y, ldy, add);
        if (T == 6) return linear_f_rows<V, BFLOAT, 6>(w, first, last, x, ldx, y, ldy, add);
        if (T == 7) return linear_f_rows<V, BFLOAT, 7>(w, first, last, x, ldx, y, ldy, add);
        linear_f_rows<V, BFLOAT, 8>(w, first, last, x, ldx, y, ldy, add);
    }
}

template <class V>
void linear_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    if (w.kind == Kind::BF16) return linear_f_any<V, true>(w, first, last, x, ldx, T, y, ldy, add);
    return linear_f_any<V, false>(w, first, last, x, ldx, T, y, ldy, add);
}

}  // namespace
}  // namespace orchard
