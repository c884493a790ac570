// Palettes times rows of digits, for AVX-512 with VNNI.
//
// A table of a half of a block (kernels.h) fills one register of 32 words, and stands there twice or more: whatever lies above a code
// in its word picks the same entry, so codes are shifted down and never masked. Products of entries and activations are whole
// numbers, so sums do not depend on their order, and a row gets the same bits alone and among others.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <vector>

#include "linear_common.h"

namespace orchard {

void palette_avx512(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add);

namespace {

constexpr int GROUP = 32;  // columns; as many as 32 bits add up: 2^15 * 127 * BASE * 32 < 2^31
constexpr int PAIRS = GROUP / 2;

struct Table {
    __m512i entries;
    float unit;
};

// As `whole_entries` of linear_common.h.
template <int BITS>
inline Table table_of(const uint8_t* halves) {
    alignas(32) uint16_t repeated[16];
    if (BITS == 4) {
        std::memcpy(repeated, halves, 32);
    } else {
        for (int i = 0; i < 16; i += 4) std::memcpy(repeated + i, halves, 8);
    }
    const __m512 values = _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)repeated));
    const __m512i magnitudes = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
    const uint32_t most = (uint32_t)_mm512_reduce_max_epi32(magnitudes);
    if (!most || most >= 0x7f800000u) return {_mm512_setzero_si512(), most ? NAN : 0.0f};
    const uint32_t exponent = most & 0x7f800000u;
    const float unit = float_of_bits(exponent - (14u << 23)), inverse = 1.0f / unit;
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse))));
    return {_mm512_broadcast_i64x4(words), unit};
}

// Rows of digits as whole numbers of 16 bits, by twos: of the code that begins at bit s * BITS of a word in the lower and in the upper half
// of four bytes, for all s of a chunk and all chunks.
template <int BITS>
const int32_t* pairs_of(const QuantRows& x, int T, int padded) {
    static thread_local std::vector<int32_t> room;
    if (room.size() < (size_t)T * padded / 2) room.resize((size_t)T * padded / 2);
    constexpr int PARTS = 8 / BITS, STEPS = 16 / BITS;
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; ++i) {
        const int chunk = i / STEPS, s = i % STEPS, column = chunk * 4 * PARTS + s % PARTS * 4 + s / PARTS;
        order[2 * i] = (uint16_t)column, order[2 * i + 1] = (uint16_t)(column + 2);
    }
    const __m512i places = _mm512_load_si512(order);
    int32_t* to = room.data();
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < padded; c += GROUP, to += PAIRS) {
            const int8_t* const digits = x.digits + (size_t)t * x.ldd + digit_at(c);
            const __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)digits));
            const __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(digits + 32)));
            static_assert(BASE == 16, "a shift by four bits");
            const __m512i whole = _mm512_add_epi16(_mm512_slli_epi16(high, 4), low);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(places, whole));
        }
    return room.data();
}

// sum + a · b for 16 pairs. Written out because g++ 12 copies the sum to and fro round its own intrinsic.
inline void dot(__m512i& sum, __m512i a, __m512i b) { __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

template <int BITS, int T>
void some_rows(const Weight& w, int first, int last, int until, const QuantRows& x, const int32_t* pairs, float* y, int ldy, bool add) {
    constexpr int STEPS = 16 / BITS, CHUNKS = BITS, CHAINS = T <= 2 ? 2 : 1;  // products take long: several sums are under way at once
    const int groups = w.padded_cols() / GROUP;
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + until * block_bytes;
    for (int b = first; b < last; ++b) {
        const uint8_t* at = w.data + b * block_bytes;
        const Table tables[2] = {table_of<BITS>(at), table_of<BITS>(at + 32)};
        __m512 sums[T][2];
        for (int t = 0; t < T; ++t) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
        at += 64;
        for (int g = 0; g < groups; ++g) {
            __m512i dots[T][2][CHAINS];
            for (int t = 0; t < T; ++t)
                for (int i = 0; i < 2 * CHAINS; ++i) dots[t][i / CHAINS][i % CHAINS] = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int c = 0; c < CHUNKS; ++c, at += 128) {
                // Nothing past the end of this call's blocks is asked for: another thread reads that.
                const uint8_t* const ahead = at + AHEAD + 128 <= end ? at + AHEAD : at;
                _mm_prefetch((const char*)ahead, _MM_HINT_T0);
                _mm_prefetch((const char*)ahead + 64, _MM_HINT_T0);
                const __m512i word[2] = {_mm512_load_si512(at), _mm512_load_si512(at + 64)};
#pragma GCC unroll 8
                for (int s = 0; s < STEPS; ++s) {
                    __m512i entries[2];
                    for (int h = 0; h < 2; ++h)
                        entries[h] = _mm512_permutexvar_epi16(s ? _mm512_srli_epi16(word[h], (unsigned)(s * BITS)) : word[h], tables[h].entries);
#pragma GCC unroll 4
                    for (int t = 0; t < T; ++t) {
                        const __m512i two = _mm512_set1_epi32(pairs[(size_t)t * groups * PAIRS + g * PAIRS + c * STEPS + s]);
                        for (int h = 0; h < 2; ++h) dot(dots[t][h][s % CHAINS], entries[h], two);
                    }
                }
            }
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                const __m512 scale = _mm512_set1_ps(x.scale[t * x.ldg + g]);
                for (int h = 0; h < 2; ++h) {
                    const __m512i whole = CHAINS == 2 ? _mm512_add_epi32(dots[t][h][0], dots[t][h][CHAINS - 1]) : dots[t][h][0];
                    sums[t][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sums[t][h]);
                }
            }
        }
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < 2; ++h) {
                const int row = b * 32 + h * 16, real = w.rows - row;
                if (real <= 0) continue;
                const __mmask16 mask = real >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << real) - 1);
                float* const to = y + (size_t)t * ldy + row;
                __m512 sum = _mm512_mul_ps(sums[t][h], _mm512_set1_ps(tables[h].unit));
                if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
                _mm512_mask_storeu_ps(to, mask, sum);
            }
    }
}

// Four rows are what registers hold; the others follow while the block is still in the nearest cache.
template <int BITS>
void any_rows(const Weight& w, int first, int last, int until, const QuantRows& x, const int32_t* pairs, int T, float* y, int ldy, bool add) {
    if (T == 1) return some_rows<BITS, 1>(w, first, last, until, x, pairs, y, ldy, add);
    if (T == 2) return some_rows<BITS, 2>(w, first, last, until, x, pairs, y, ldy, add);
    if (T == 3) return some_rows<BITS, 3>(w, first, last, until, x, pairs, y, ldy, add);
    if (T == 4) return some_rows<BITS, 4>(w, first, last, until, x, pairs, y, ldy, add);
    const int32_t* const rest = pairs + (size_t)4 * w.padded_cols() / 2;
    for (int b = first; b < last; ++b) {
        some_rows<BITS, 4>(w, b, b + 1, until, x, pairs, y, ldy, add);
        any_rows<BITS>(w, b, b + 1, until, x.from(4), rest, T - 4, y + (size_t)4 * ldy, ldy, add);
    }
}

}  // namespace

void palette_avx512(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    const int padded = w.padded_cols();
    if (w.kind == Kind::P4) return any_rows<4>(w, first, last, last, x, pairs_of<4>(x, T, padded), T, y, ldy, add);
    any_rows<2>(w, first, last, last, x, pairs_of<2>(x, T, padded), T, y, ldy, add);
}

}  // namespace orchard
