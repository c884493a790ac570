// Linear kernels for AVX-512 with VNNI. One block of 32 rows is two registers of 16 rows, called halves.
//
// Weights are read once, in order, at the speed of memory: that is what decides the time of a decoding step. Codes go into the
// integer dot product unsigned, as they are stored; `sum` of the activations takes the zero point off afterwards.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "linear_common.h"

namespace orchard {

void palette_avx512(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add);
void blocks_avx512(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add);

namespace {

inline __m512 halves_to_floats(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)from));
}

inline __m512i four_bytes_everywhere(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return _mm512_set1_epi32(word);
}

template <bool NEAR = true>
inline void prefetch(const uint8_t* at) {
    _mm_prefetch((const char*)at, NEAR ? _MM_HINT_T0 : _MM_HINT_T1);
}

inline void store_rows(float* y, __m512 sums, int rows, bool add) {
    if (rows <= 0) return;
    const __mmask16 real = rows >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << rows) - 1);
    if (add) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(real, y));
    _mm512_mask_storeu_ps(y, real, sums);
}

void quantise(const float* x, int cols, int padded, int group, int8_t* digits, float* scale, float* sum) {
    const __m512 one_of_base = _mm512_set1_ps(1.0f / BASE);
    const __m512i base = _mm512_set1_epi32(BASE);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int g = 0; g * group < padded; ++g) {
        const float* from = x + g * group;
        const int count = cols - g * group < group ? cols - g * group : group;
        __m512i most = _mm512_setzero_si512();
        for (int i = 0; i < count; i += 16) {
            const __mmask16 real = count - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (count - i)) - 1);
            const __m512i bits = _mm512_maskz_loadu_epi32(real, from + i);
            most = _mm512_max_epi32(most, _mm512_and_si512(bits, magnitude));
        }
        const GroupScale found = scale_of((uint32_t)_mm512_reduce_max_epi32(most));
        const __m512 inverse = _mm512_set1_ps(found.inverse);
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < group; i += 16) {
            const __mmask16 real =
                count - i >= 16 ? (__mmask16)0xffff : count > i ? (__mmask16)((1u << (count - i)) - 1) : (__mmask16)0;
            // With an inverse of zero, infinity times zero becomes the smallest integer, whose low byte is 0.
            const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(real, from + i), inverse);
            const __m512i whole = _mm512_cvtps_epi32(value), high = _mm512_cvtps_epi32(_mm512_mul_ps(value, one_of_base));
            total = _mm512_add_epi32(total, whole);
            const __m512i rest = _mm512_sub_epi32(whole, _mm512_mullo_epi32(high, base));
            int8_t* const to = digits + digit_at(g * group + i);
            _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((__m128i*)(to + 32), _mm512_cvtepi32_epi8(rest));
        }
        scale[g] = found.scale;
        sum[g] = found.scale * (float)_mm512_reduce_add_epi32(total);
    }
}

// The integer dot products of one group: `dots[d][h]` for D rows of digits and HALVES halves, the first of which is `half`.
template <int BITS, int D, int HALVES>
inline void group_dots(const uint8_t* codes, int chunks, int half, const int8_t* const (&x)[D], const uint8_t* ahead, int near,
                       __m512i (&dots)[D][HALVES]) {
    constexpr int PARTS = 8 / BITS;  // codes in a byte
    const __m512i mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    if constexpr (D == 2) {  // one row of activations
        // Codes stay where they are in their bytes, so each is 1, 2^BITS, ... times too large; that is put right once a group.
        constexpr int CHAINS = BITS == 8 ? 2 : PARTS;
        __m512i chain[CHAINS][D][HALVES];
        for (int j = 0; j < CHAINS; ++j)
            for (int d = 0; d < D; ++d)
                for (int h = 0; h < HALVES; ++h) chain[j][d][h] = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int c = 0; c < chunks; ++c) {
            __m512i word[HALVES];
            for (int h = 0; h < HALVES; ++h) {
                if (near) {
                    prefetch<false>(ahead + c * 128 + h * 64);
                    prefetch(codes + c * 128 + h * 64 + near);
                } else {
                    prefetch(ahead + c * 128 + h * 64);
                }
                word[h] = _mm512_load_si512(codes + c * 128 + (half + h) * 64);
            }
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; ++j) {
                const __m512i high = four_bytes_everywhere(x[0] + digit_at((c * PARTS + j) * 4));
                const __m512i low = four_bytes_everywhere(x[1] + digit_at((c * PARTS + j) * 4));
                const int k = BITS == 8 ? c % 2 : j;
                for (int h = 0; h < HALVES; ++h) {
                    const __m512i code = BITS == 8 ? word[h] : _mm512_and_si512(word[h], _mm512_slli_epi16(mask, j * BITS));
                    chain[k][0][h] = _mm512_dpbusd_epi32(chain[k][0][h], code, high);
                    chain[k][1][h] = _mm512_dpbusd_epi32(chain[k][1][h], code, low);
                }
            }
        }
        for (int d = 0; d < D; ++d)
            for (int h = 0; h < HALVES; ++h) {
                dots[d][h] = chain[0][d][h];
                for (int j = 1; j < CHAINS; ++j) {
                    const __m512i part = BITS == 8 ? chain[j][d][h] : _mm512_srai_epi32(chain[j][d][h], j * BITS);
                    dots[d][h] = _mm512_add_epi32(dots[d][h], part);
                }
            }
    } else {
        for (int d = 0; d < D; ++d)
            for (int h = 0; h < HALVES; ++h) dots[d][h] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            __m512i word[HALVES];
            for (int h = 0; h < HALVES; ++h) word[h] = _mm512_load_si512(codes + c * 128 + (half + h) * 64);
            for (int h = 0; h < HALVES; ++h) prefetch<HALVES == 2>(ahead + c * 128 + (half + h) * 64);
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; ++j) {
                __m512i code[HALVES];
                for (int h = 0; h < HALVES; ++h)
                    code[h] = BITS == 8 ? word[h] : _mm512_and_si512(_mm512_srli_epi16(word[h], j * BITS), mask);
#pragma GCC unroll 16
                for (int d = 0; d < D; ++d) {
                    const __m512i some = four_bytes_everywhere(x[d] + digit_at((c * PARTS + j) * 4));
                    for (int h = 0; h < HALVES; ++h) dots[d][h] = _mm512_dpbusd_epi32(dots[d][h], code[h], some);
                }
            }
        }
    }
}

// GROUP 0: any multiple of 32. From three rows on the sums of a whole block do not fit into 32 registers, so halves take turns.
// Weights are asked for ahead up to block `until`.
template <int BITS, int GROUP, bool MINIMUM, int T>
void linear_q_rows(const Weight& w, int first, int last, int until, const QuantRows& x, float* y, int ldy, bool add) {
    constexpr int HALVES = T <= 4 ? 2 : 1;
    constexpr int HEADER = MINIMUM ? 128 : 64;
    const int group = GROUP ? GROUP : w.group;
    const int groups = w.padded_cols() / group, chunks = group * BITS / 32;
    const size_t group_bytes = HEADER + (size_t)group * BITS * 4, block_bytes = groups * group_bytes;
    const uint8_t* const end = w.data + until * block_bytes;
    // Where halves take turns, each asks for its own lines of the next block, so that memory is kept busy all the time.
    // A matrix that does not come from a cache is asked for earlier, and once more when it is close.
    const bool large = w.blocks() * block_bytes > LARGE;
    const size_t distance = HALVES == 2 ? (large ? FAR : AHEAD) : block_bytes;
    const int near = large ? NEAR : 0;
    const float zero = zero_of(w.kind, MINIMUM);
    for (int b = first; b < last; ++b) {
        for (int half = 0; half < 2; half += HALVES) {
            const uint8_t* at = w.data + b * block_bytes;
            __m512 sums[T][HALVES];
            for (int t = 0; t < T; ++t)
                for (int h = 0; h < HALVES; ++h) sums[t][h] = _mm512_setzero_ps();
            for (int g = 0; g < groups; ++g, at += group_bytes) {
                // Nothing past the end of this call's blocks is asked for: another thread reads that.
                const uint8_t* const ahead = at + distance + group_bytes <= end ? at + distance : at;
                prefetch<HALVES == 2>(ahead);
                if (MINIMUM) prefetch<HALVES == 2>(ahead + 64);
                const int8_t* rows[2 * T];
                for (int t = 0; t < T; ++t) {
                    rows[2 * t] = x.digits + (size_t)t * x.ldd + 2 * g * group;
                    rows[2 * t + 1] = rows[2 * t] + 32;
                }
                __m512i dots[2 * T][HALVES];
                group_dots<BITS, 2 * T, HALVES>(at + HEADER, GROUP ? GROUP * BITS / 32 : chunks, half, rows, ahead + HEADER, near, dots);
                __m512 scale[HALVES], minimum[HALVES];
                for (int h = 0; h < HALVES; ++h) {
                    scale[h] = halves_to_floats(at + (half + h) * 32);
                    if (MINIMUM) minimum[h] = halves_to_floats(at + 64 + (half + h) * 32);
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const __m512 x_scale = _mm512_set1_ps(x.scale[t * x.ldg + g]), x_sum = _mm512_set1_ps(x.sum[t * x.ldg + g]);
                    const __m512 shift = _mm512_mul_ps(x_sum, _mm512_set1_ps(zero));
                    for (int h = 0; h < HALVES; ++h) {
                        const __m512 high = _mm512_cvtepi32_ps(dots[2 * t][h]), low = _mm512_cvtepi32_ps(dots[2 * t + 1][h]);
                        const __m512 dot = _mm512_fmadd_ps(high, _mm512_set1_ps(BASE), low);
                        const __m512 part = MINIMUM ? _mm512_mul_ps(dot, x_scale) : _mm512_fmsub_ps(dot, x_scale, shift);
                        sums[t][h] = _mm512_fmadd_ps(part, scale[h], sums[t][h]);
                        if (MINIMUM) sums[t][h] = _mm512_fmadd_ps(minimum[h], x_sum, sums[t][h]);
                    }
                }
            }
            for (int t = 0; t < T; ++t)
                for (int h = 0; h < HALVES; ++h) {
                    const int row = b * 32 + (half + h) * 16;
                    store_rows(y + (size_t)t * ldy + row, sums[t][h], w.rows - row, add);
                }
        }
    }
}

template <int BITS, int GROUP, bool MINIMUM>
void linear_q_any(const Weight& w, int first, int last, QuantRows x, int T, float* y, int ldy, bool add) {
    if (T == 1) return linear_q_rows<BITS, GROUP, MINIMUM, 1>(w, first, last, last, x, y, ldy, add);
    if (T == 2) return linear_q_rows<BITS, GROUP, MINIMUM, 2>(w, first, last, last, x, y, ldy, add);
    if (T == 3) return linear_q_rows<BITS, GROUP, MINIMUM, 3>(w, first, last, last, x, y, ldy, add);
    if (T == 4) return linear_q_rows<BITS, GROUP, MINIMUM, 4>(w, first, last, last, x, y, ldy, add);
    // Eight digits are what registers hold: four rows, then the others while the block is still in the nearest cache.
    const QuantRows rest = x.from(4);
    for (int b = first; b < last; ++b) {
        linear_q_rows<BITS, GROUP, MINIMUM, 4>(w, b, b + 1, last, x, y, ldy, add);
        linear_q_any<BITS, GROUP, MINIMUM>(w, b, b + 1, rest, T - 4, y + (size_t)4 * ldy, ldy, add);
    }
}

template <int BITS>
void linear_q_bits(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    if (w.minimum) {
        if (w.group == 32) return linear_q_any<BITS, 32, true>(w, first, last, x, T, y, ldy, add);
        if (w.group == 64) return linear_q_any<BITS, 64, true>(w, first, last, x, T, y, ldy, add);
        return linear_q_any<BITS, 0, true>(w, first, last, x, T, y, ldy, add);
    }
    if (w.group == 32) return linear_q_any<BITS, 32, false>(w, first, last, x, T, y, ldy, add);
    if (w.group == 64) return linear_q_any<BITS, 64, false>(w, first, last, x, T, y, ldy, add);
    return linear_q_any<BITS, 0, false>(w, first, last, x, T, y, ldy, add);
}

void linear_q(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    switch (w.kind) {
        case Kind::Q8: return linear_q_bits<8>(w, first, last, x, T, y, ldy, add);
        case Kind::Q4: return linear_q_bits<4>(w, first, last, x, T, y, ldy, add);
        case Kind::P4: case Kind::P2: return palette_avx512(w, first, last, x, T, y, ldy, add);
        default: return linear_q_bits<2>(w, first, last, x, T, y, ldy, add);
    }
}

// F16 by columns of its own width: a last block may have room for 16 rows only. Two columns at a time, as below.
template <int T, int HALVES>
inline void halves_block(const uint8_t* at, const uint8_t* end, int cols, const float* x, int ldx, __m512 (&total)[T][2]) {
    __m512 sums[2][T][HALVES];
    for (int i = 0; i < 2 * T * HALVES; ++i) sums[i / HALVES / T][i / HALVES % T][i % HALVES] = _mm512_setzero_ps();
    for (int c = 0; c < cols; c += 2, at += 64 * HALVES) {
        const uint8_t* const ahead = at + AHEAD + 64 * HALVES <= end ? at + AHEAD : at;
        for (int h = 0; h < HALVES; ++h) prefetch(ahead + h * 64);
        const bool both = c + 1 < cols;
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k)
            for (int h = 0; h < HALVES; ++h) {
                const __m512 column = k == 0 || both ? halves_to_floats(at + k * 32 * HALVES + h * 32) : _mm512_setzero_ps();
#pragma GCC unroll 4
                for (int t = 0; t < T; ++t)
                    sums[k][t][h] = _mm512_fmadd_ps(column, _mm512_set1_ps(k == 0 || both ? x[(size_t)t * ldx + c + k] : 0.0f), sums[k][t][h]);
            }
    }
    for (int t = 0; t < T; ++t)
        for (int h = 0; h < HALVES; ++h) total[t][h] = _mm512_add_ps(sums[0][t][h], sums[1][t][h]);
}

template <int T>
void halves_rows(const Weight& w, int first, int last, int all, const float* x, int ldx, float* y, int ldy, bool add) {
    const uint8_t* const end = w.data + all * w.block_bytes();
    for (int b = first; b < last; ++b) {
        const bool narrow = w.lanes(b) == 16;
        __m512 total[T][2];
        if (narrow)
            halves_block<T, 1>(w.data + b * w.block_bytes(), end, w.cols, x, ldx, total);
        else
            halves_block<T, 2>(w.data + b * w.block_bytes(), end, w.cols, x, ldx, total);
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < (narrow ? 1 : 2); ++h)
                store_rows(y + (size_t)t * ldy + b * 32 + h * 16, total[t][h], w.rows - b * 32 - h * 16, add);
    }
}

// Two columns at a time, with sums of their own, because additions take four cycles each. Sums are the same for any T: what a row
// gets must not depend on how many there are.
template <Kind KIND, int T>
void linear_f_rows(const Weight& w, int first, int last, int all, const float* x, int ldx, float* y, int ldy, bool add) {
    if constexpr (KIND == Kind::F16) return halves_rows<T>(w, first, last, all, x, ldx, y, ldy, add);
    constexpr int PAIR = KIND == Kind::F32 ? 256 : 128;  // bytes of two columns
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + all * block_bytes;
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    for (int b = first; b < last; ++b) {
        const uint8_t* at = w.data + b * block_bytes;
        __m512 sums[2][T][2];
        for (int k = 0; k < 2; ++k)
            for (int t = 0; t < T; ++t) sums[k][t][0] = sums[k][t][1] = _mm512_setzero_ps();
        for (int c = 0; c < w.cols; c += 2, at += PAIR) {
            const uint8_t* const ahead = at + AHEAD + PAIR <= end ? at + AHEAD : at;
            for (int line = 0; line < PAIR; line += 64) prefetch(ahead + line);
            const bool both = c + 1 < w.cols;
            __m512 column[2][2];  // [which of the two][half]
            for (int h = 0; h < 2; ++h) {
                if constexpr (KIND == Kind::BF16) {
                    const __m512i two = _mm512_load_si512(at + h * 64);
                    column[0][h] = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16));
                    column[1][h] = _mm512_castsi512_ps(_mm512_and_si512(two, upper));
                } else {
                    column[0][h] = _mm512_load_ps(at + h * 64);
                    column[1][h] = both ? _mm512_load_ps(at + 128 + h * 64) : _mm512_setzero_ps();
                }
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const float* from = x + (size_t)t * ldx + c;
                const __m512 x0 = _mm512_set1_ps(from[0]), x1 = _mm512_set1_ps(both ? from[1] : 0.0f);
                for (int h = 0; h < 2; ++h) {
                    sums[0][t][h] = _mm512_fmadd_ps(column[0][h], x0, sums[0][t][h]);
                    sums[1][t][h] = _mm512_fmadd_ps(column[1][h], x1, sums[1][t][h]);
                }
            }
        }
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < 2; ++h) {
                const int row = b * 32 + h * 16;
                store_rows(y + (size_t)t * ldy + row, _mm512_add_ps(sums[0][t][h], sums[1][t][h]), w.rows - row, add);
            }
    }
}

template <Kind KIND>
void linear_f_any(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    if (T == 1) return linear_f_rows<KIND, 1>(w, first, last, last, x, ldx, y, ldy, add);
    if (T == 2) return linear_f_rows<KIND, 2>(w, first, last, last, x, ldx, y, ldy, add);
    if (T == 3) return linear_f_rows<KIND, 3>(w, first, last, last, x, ldx, y, ldy, add);
    if (T == 4) return linear_f_rows<KIND, 4>(w, first, last, last, x, ldx, y, ldy, add);
    for (int b = first; b < last; ++b) {  // four rows are what registers hold
        linear_f_rows<KIND, 4>(w, b, b + 1, last, x, ldx, y, ldy, add);
        linear_f_any<KIND>(w, b, b + 1, x + (size_t)4 * ldx, ldx, T - 4, y + (size_t)4 * ldy, ldy, add);
    }
}

void linear_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    if (w.kind == Kind::BF16) return linear_f_any<Kind::BF16>(w, first, last, x, ldx, T, y, ldy, add);
    if (w.kind == Kind::BLOCKS) return blocks_avx512(w, first, last, x, ldx, T, y, ldy, add);
    if (w.kind == Kind::F16) return linear_f_any<Kind::F16>(w, first, last, x, ldx, T, y, ldy, add);
    return linear_f_any<Kind::F32>(w, first, last, x, ldx, T, y, ldy, add);
}

}  // namespace

extern const LinearKernels LINEAR_AVX512 = {"avx512-vnni", SMALL, quantise, linear_q, linear_f, plain_row};

}  // namespace orchard
