// Linear kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "linear_template.h"

namespace orchard {
namespace {

struct Avx2 {
    static constexpr int LANES = 8, MOST = 8;
    static constexpr bool QUADS = false;
    using Floats = __m256;
    using Ints = __m256i;
    using Bytes = __m256i;
    static constexpr int strips(int T) { return T == 1 ? 4 : T == 2 ? 2 : 1; }

    static Floats zero() { return _mm256_setzero_ps(); }
    static Ints zeros() { return _mm256_setzero_si256(); }
    static Floats everywhere(float value) { return _mm256_set1_ps(value); }
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Floats a) { _mm256_storeu_ps(to, a); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats convert(Ints a) { return _mm256_cvtepi32_ps(a); }
    static Ints round(Floats a) { return _mm256_cvtps_epi32(a); }
    static Floats halves(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
    static Floats lower(const uint8_t* from) { return _mm256_castsi256_ps(_mm256_slli_epi32(bytes(from), 16)); }
    static Floats upper(const uint8_t* from) {
        return _mm256_castsi256_ps(_mm256_and_si256(bytes(from), _mm256_set1_epi32((int)0xffff0000u)));
    }
    static void store_bytes(int8_t* to, Ints a) {
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
    }
    static Ints less(Ints a, Ints b, int factor) { return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, _mm256_set1_epi32(factor))); }
    static int32_t total(Ints a) {
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
    }

    static Bytes bytes(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
    static Bytes four_bytes(const int8_t* from) {
        int32_t word;
        std::memcpy(&word, from, 4);
        return _mm256_set1_epi32(word);
    }
    template <int BITS>
    static Bytes part(Bytes a, int j) {
        if (BITS == 8) return _mm256_xor_si256(a, _mm256_set1_epi8((char)0x80));
        return _mm256_and_si256(_mm256_srli_epi16(a, j * BITS), _mm256_set1_epi8((char)((1 << BITS) - 1)));
    }
    template <int BITS>
    static Ints dot(Ints sum, Bytes codes, Bytes x) {
        // The products of two bytes are added in 16 bits and must not overflow: at most 2 * 15 * 127 for small codes. Codes of 8
        // bits are signed here; with their sign moved to x the sum is at most 2 * 128 * 127 = 32512, which just fits.
        const Bytes first = BITS == 8 ? _mm256_abs_epi8(codes) : codes, second = BITS == 8 ? _mm256_sign_epi8(x, codes) : x;
        const __m256i pairs = _mm256_maddubs_epi16(first, second);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    struct Table {  // low and high bytes of the entries, in both halves of a register
        __m256i low, high;
    };
    struct Wide {  // of the first two and of the last two of every four rows, each in two pieces
        __m256i first, last;
    };
    static Table table(const int16_t* entries) {
        alignas(16) uint8_t low[16], high[16];
        for (int i = 0; i < 16; ++i) low[i] = (uint8_t)entries[i], high[i] = (uint8_t)((uint16_t)entries[i] >> 8);
        return {_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)low)),
                _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)high))};
    }
    static Wide wide_zeros() { return {zeros(), zeros()}; }
    static Ints narrowed(const Wide& sum) { return _mm256_hadd_epi32(sum.first, sum.last); }
    static void look_up(Wide& sum, const Table& table, Bytes codes, const int16_t* x) {
        int64_t four;
        std::memcpy(&four, x, 8);
        const __m256i numbers = _mm256_set1_epi64x(four);
        const __m256i low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
        sum.first = _mm256_add_epi32(sum.first, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, high), numbers));
        sum.last = _mm256_add_epi32(sum.last, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, high), numbers));
    }
};

}  // namespace

extern const LinearKernels LINEAR_AVX2 = {"avx2", SMALL, quantise<Avx2>, linear_q<Avx2>, linear_f<Avx2>, plain_row};

}  // namespace orchard
