// Attention for x86 processors with AVX-512 and VNNI.
//
// bfloat16 goes through plain fused multiply-adds after widening: the dot product instruction for bfloat16 (vdpbf16ps) takes as
// long as four of them and would round queries and weights. 8-bit integers go through 16-bit dot products.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says so of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "attention_vq_many.h"

namespace orchard {
extern const AttentionKernels attention_avx512;

namespace {

struct Avx512 {
    typedef __m512 F;
    static constexpr int W = 16, SCORE_SLOTS = 32, HEADS = 4, COLUMNS = 4, REGISTERS = 16;

    static F set(float a) { return _mm512_set1_ps(a); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F with_sign_of(F a, F sign) { return _mm512_or_ps(a, _mm512_and_ps(set(-0.0f), sign)); }
    static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F where(const int32_t* mask, F a, F b) {
        return _mm512_mask_mov_ps(b, _mm512_movepi32_mask(_mm512_loadu_si512(mask)), a);
    }
    static F zero_below(F a, F x, float bound) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(bound), _CMP_NLT_UQ), a); }
    static F power_of_two(F n) { return _mm512_scalef_ps(set(1), n); }
    static void bf16_pairs(const uint8_t* p, F& even, F& odd) {
        __m512i pairs = _mm512_loadu_si512(p);
        even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
    }
    static void int8_pairs(const uint8_t* p, F& even, F& odd) {
        __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
        even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
        odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8));
    }
    typedef __m512i S;
    static S load_short(const int16_t* p) { return _mm512_loadu_si512(p); }
    static S add_short(S a, S b) { return _mm512_add_epi16(a, b); }
    static S sub_short(S a, S b) { return _mm512_sub_epi16(a, b); }
    static void widen(S a, F& low, F& high) {
        low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(a)));
        high = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(a, 1)));
    }
    static void sum_four(const F* a, float* out) {
        for (int i = 0; i < 4; i++) out[i] = _mm512_reduce_add_ps(a[i]);
    }
    static float largest(F a) { return _mm512_reduce_max_ps(a); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
};

// The same as elsewhere, with an instruction that multiplies by powers of two and makes 0 of what is too small.
template <>
inline __m512 exponential<Avx512>(__m512 x) {
    __m512 n = Avx512::round(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693145751953125f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-1.42860677e-6f), r);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.0f / 720), r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);  // also for -inf, where r and y are no numbers: 2^-inf times that is defined as 0
}

// Queries and weights as 16-bit integers: one instruction then multiplies and adds pairs of sixteen slots or columns.
template <>
struct Kernel<Avx512, ReadInt8<Avx512>> {
    typedef ReadInt8<Avx512> Codec;
    static constexpr int AHEAD = 4096;

    static __m512i codes(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
    static __m512i pair_of(const float* row, int pair) { return _mm512_set1_epi32(((const int32_t*)row)[pair]); }

    // sum + a · b for 16 pairs. Written out because g++ 12 copies the sum to and fro round its own intrinsic.
    static void dot(__m512i& sum, __m512i a, __m512i b) { __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

    // x in place to 16-bit integers of size up to `limit`. What is not finite makes the factor no number.
    static void to_int16(float* x, int n, float limit, float* factor) {
        __m512 most = _mm512_setzero_ps(), nothing = most;
        for (int c = 0; c < n; c += 16) {
            __m512 part = _mm512_loadu_ps(x + c);
            most = _mm512_max_ps(most, _mm512_abs_ps(part));
            nothing = _mm512_fmadd_ps(part, _mm512_setzero_ps(), nothing);
        }
        float size = _mm512_reduce_max_ps(most);
        *factor = size / limit + _mm512_reduce_add_ps(nothing);
        __m512 inverse = _mm512_set1_ps(size > 1e-30f ? limit / size : 0);
        for (int c = 0; c < n; c += 16) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + c), inverse));
            _mm256_storeu_si256((__m256i*)((int16_t*)x + c), _mm512_cvtsepi32_epi16(whole));  // never past what was read
        }
    }

    // Sums of 127 * limit * width and of 127 * limit * SPAN must stay below 2^31.
    static void prepare_query(float* q, int width, float* factor) {
        to_int16(q, width, width <= 512 ? 32767 : (float)(16900000 / width), factor);
    }
    static void prepare_weights(float* p, int slots, float* factor) { to_int16(p, slots, 32767, factor); }

    template <int R>
    static void score_step(const uint8_t* keys, int width, const float* q, const float* factor, float* out) {
        __m512i sum[R][2][2];  // [head][block of slots][even or odd pair: additions need not wait for each other]
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 4; i++) sum[r][i / 2][i % 2] = _mm512_setzero_si512();
        for (int pair = 0; pair < width / 2; pair += 2) {
            for (int i = 0; i < 2; i++) {
                const uint8_t* at = Codec::key_place(keys + (size_t)i * BLOCK * width, pair, 0);
                __builtin_prefetch(at + AHEAD);
                __m512i even = codes(at), odd = codes(at + 32);
                for (int r = 0; r < R; r++) {
                    dot(sum[r][i][0], even, pair_of(q + r * width, pair));
                    dot(sum[r][i][1], odd, pair_of(q + r * width, pair + 1));
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < 2; i++) {
                __m512 score = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r][i][0], sum[r][i][1]));
                Avx512::store(out + r * SPAN + i * BLOCK, _mm512_mul_ps(score, _mm512_set1_ps(factor[r])));
            }
        }
    }

    template <int R, int C, bool WHOLE>  // codes are numbers whatever they are, and what is not seen has a weight of 0
    static void value_run(const uint8_t* v, int width, int column, const Run& run, const float* p, const float* factor,
                          float* sums) {
        __m512i sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_si512();
        for (int pair = run.begin; pair < run.end; pair++) {
            const uint8_t* at = Codec::value_place(Codec::values(v, width, pair * 2), column);
            for (int c = 0; c < C; c++) {
                if (c % 2 == 0) __builtin_prefetch(at + c * 32 + AHEAD);
                __m512i value = codes(at + c * 32);
                for (int r = 0; r < R; r++) dot(sum[r][c], value, pair_of(p + r * SPAN, pair));
            }
        }
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++) {
                float* to = sums + r * width + column + c * 16;
                __m512 scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][c]), _mm512_set1_ps(factor[r]), Avx512::load(to));
                Avx512::store(to, scaled);
            }
        }
    }
};

// bfloat16 in the lower half of each element, rounded to nearest, half to even; a NaN stays one.
__m512i to_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i half = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    __mmask16 no_number = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, no_number, high, _mm512_set1_epi32(0x40));
}

// One slot of bfloat16, sixteen channels at a time: pairs of key channels are a block of slots apart, values two elements.
void put(const Store& s, int head, int slot, const float* k, const float* v) {
    if (s.codec != Codec::BF16) return attention_put(s, head, slot, k, v);
    uint16_t* key = (uint16_t*)(s.k + head * s.head_bytes()) + (size_t)(slot / BLOCK) * s.width * BLOCK + slot % BLOCK * 2;
    uint16_t* value = (uint16_t*)(s.v + head * s.head_bytes()) + (size_t)(slot / 2) * s.width * 2;
    const __m256i places = _mm256_setr_epi32(0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK, 6 * BLOCK, 7 * BLOCK);
    for (int c = 0; c < s.width; c += 16) {  // channels past the last real one are written as the zeros they are
        __mmask16 real = s.dim - c >= 16 ? 0xffff : s.dim > c ? (1 << (s.dim - c)) - 1 : 0;
        __m256i pairs = _mm512_cvtepi32_epi16(to_bf16(_mm512_maskz_loadu_ps(real, k + c)));
        _mm256_i32scatter_epi32(key + c * BLOCK, places, pairs, 4);
        __m512i values = to_bf16(_mm512_maskz_loadu_ps(real, v + c));
        if (slot % 2) values = _mm512_slli_epi32(values, 16);
        _mm512_mask_storeu_epi16(value + c * 2, slot % 2 ? 0xaaaaaaaa : 0x55555555, values);
    }
}

}  // namespace

const AttentionKernels attention_avx512 = {"avx512", put, scratch_bytes, part<Avx512>, nullptr, nullptr, &vq_kernels<Avx512>};

}  // namespace orchard
