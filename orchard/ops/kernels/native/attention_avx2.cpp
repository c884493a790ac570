// Attention for x86 processors with AVX2 and FMA.
#include <immintrin.h>

#include "attention_vq_many.h"

namespace orchard {
extern const AttentionKernels attention_avx2;

namespace {

struct Avx2 {
    typedef __m256 F;
    static constexpr int W = 8, SCORE_SLOTS = 16, HEADS = 4, COLUMNS = 2, REGISTERS = 8;

    static F set(float a) { return _mm256_set1_ps(a); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
    static F with_sign_of(F a, F sign) { return _mm256_or_ps(a, _mm256_and_ps(set(-0.0f), sign)); }
    static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F where(const int32_t* mask, F a, F b) { return _mm256_blendv_ps(b, a, load((const float*)mask)); }
    static F zero_below(F a, F x, float bound) { return _mm256_andnot_ps(_mm256_cmp_ps(x, set(bound), _CMP_LT_OQ), a); }
    static F power_of_two(F n) {
        __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    static void bf16_pairs(const uint8_t* p, F& even, F& odd) {
        __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
        even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
    }
    static void int8_pairs(const uint8_t* p, F& even, F& odd) {
        __m256i pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
        even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24));
        odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 8));
    }
    typedef __m256i S;
    static S load_short(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static S add_short(S a, S b) { return _mm256_add_epi16(a, b); }
    static S sub_short(S a, S b) { return _mm256_sub_epi16(a, b); }
    static void widen(S a, F& low, F& high) {
        low = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)));
        high = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)));
    }
    static void sum_four(const F* a, float* out) {
        __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }
    static float largest(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    static float sum(F a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
};

}  // namespace

const AttentionKernels attention_avx2 = {"avx2", attention_put, scratch_bytes, part<Avx2>, nullptr, nullptr, &vq_kernels<Avx2>};

}  // namespace orchard
