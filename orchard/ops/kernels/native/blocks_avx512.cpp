// 6×6 blocks times rows of activations in float32, for AVX-512: the six columns of a block are added up before they meet its scale.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "blocks_avx512.h"

namespace orchard {

void blocks_avx512(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add);

namespace {

constexpr int GROUP = 48, CHUNKS = GROUP / 8, GROUP_BYTES = 64 + CHUNKS * 128;

// One group of columns, `real` of which are there, for one half of a block.
template <int T, bool WHOLE>
inline void add_group(const BlockReader& reader, const uint8_t* group, int half, const float* x, int ldx, int real, __m512 (&sums)[T]) {
    __m512i words[CHUNKS];
    for (int c = 0; c < CHUNKS; ++c) words[c] = _mm512_load_si512(group + 64 + c * 128 + half * 64);
#pragma GCC unroll 8
    for (int s = 0; s < GROUP / BLOCK_SIDE; ++s) {
        const BlockReader::Strip strip = reader.strip(group + s * 8, half);
        __m512 part[T];
        for (int t = 0; t < T; ++t) part[t] = _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int i = 0; i < BLOCK_SIDE; ++i) {
            const int c = s * BLOCK_SIDE + i;
            if (!WHOLE && c >= real) break;
            const __m512 level = reader.level(words[c / 8], c % 8, strip.set);
            for (int t = 0; t < T; ++t) part[t] = _mm512_fmadd_ps(level, _mm512_set1_ps(x[(size_t)t * ldx + c]), part[t]);
        }
        if (!WHOLE && s * BLOCK_SIDE >= real) break;  // nothing is there: not even a scale
        for (int t = 0; t < T; ++t) sums[t] = _mm512_fmadd_ps(part[t], strip.scale, sums[t]);
    }
}

template <int T>
void some_rows(const Weight& w, int first, int last, const float* x, int ldx, float* y, int ldy, bool add) {
    BlockReader reader;
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    for (int b = first; b < last; ++b) {
        reader.set_block(b);
        for (int half = 0; half < 2; ++half) {
            const uint8_t* at = w.data + b * block_bytes;
            __m512 sums[T];
            for (int t = 0; t < T; ++t) sums[t] = _mm512_setzero_ps();
            for (int c = 0; c < w.cols; c += GROUP, at += GROUP_BYTES) {
                if (half == 0 && at + AHEAD + GROUP_BYTES <= end)
                    for (int line = 0; line < GROUP_BYTES; line += 64) _mm_prefetch((const char*)at + AHEAD + line, _MM_HINT_T0);
                if (c + GROUP <= w.cols)
                    add_group<T, true>(reader, at, half, x + c, ldx, GROUP, sums);
                else
                    add_group<T, false>(reader, at, half, x + c, ldx, w.cols - c, sums);
            }
            const int row = b * 32 + half * 16, real = w.rows - row;
            if (real <= 0) continue;
            const __mmask16 mask = real >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << real) - 1);
            for (int t = 0; t < T; ++t) {
                float* const to = y + (size_t)t * ldy + row;
                const __m512 sum = add ? _mm512_add_ps(sums[t], _mm512_maskz_loadu_ps(mask, to)) : sums[t];
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}

}  // namespace

void blocks_avx512(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    for (; T > 4; T -= 4, x += (size_t)4 * ldx, y += (size_t)4 * ldy) some_rows<4>(w, first, last, x, ldx, y, ldy, add);
    if (T == 1) return some_rows<1>(w, first, last, x, ldx, y, ldy, add);
    if (T == 2) return some_rows<2>(w, first, last, x, ldx, y, ldy, add);
    if (T == 3) return some_rows<3>(w, first, last, x, ldx, y, ldy, add);
    some_rows<4>(w, first, last, x, ldx, y, ldy, add);
}

}  // namespace orchard
