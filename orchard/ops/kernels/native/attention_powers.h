// What a softmax over tiles of scores is made of, for AVX-512: powers of two, bounded scores, the largest of each row.
#pragma once
#include <immintrin.h>

namespace orchard {
namespace {

// 2^x; 0 for -inf. `vscalef` takes 2 to the whole part of x (rounded down); the polynomials have the smallest relative error for
// a fraction in 0 .. 1: 7e-5, which is far below what rounding to bfloat16 does, or 9e-8 for scores that have yet to be a power.
template <bool EXACT>
inline __m512 power_of_two(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), y;
    if (EXACT) {
        y = _mm512_fmadd_ps(_mm512_set1_ps(0.00187757669f), f, _mm512_set1_ps(0.00898934063f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0558263175f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240153611f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693153083f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.99999994f));
    } else {
        y = _mm512_fmadd_ps(_mm512_set1_ps(0.0780245215f), f, _mm512_set1_ps(0.226067156f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.695833504f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.999925196f));
    }
    return _mm512_scalef_ps(y, x);
}

// softcap * tanh(x / softcap), to units of log 2.
inline __m512 capped(__m512 x, float softcap) {
    __m512 e = power_of_two<true>(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.88539008f / softcap)));
    __m512 one = _mm512_set1_ps(1), y = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    y = _mm512_mul_ps(y, _mm512_set1_ps(softcap * 1.44269504f));
    return _mm512_or_ps(y, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}

// The largest number of each of 16 rows, as one vector.
inline __m512 highest_of_rows(const __m512* rows) {
    __m512 pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++) {
        __m512 a = rows[2 * i], b = rows[2 * i + 1];
        pairs[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++) {
        __m512 a = fours[2 * i], b = fours[2 * i + 1];
        eights[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_max_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

}  // namespace
}  // namespace orchard
