// 6×6 blocks (kernels.h) sixteen rows at a time, for AVX-512.
#pragma once
#include <immintrin.h>

#include "linear_common.h"

namespace orchard {
namespace {

struct BlockReader {
    __m512 levels[2], scales[4];
    __m512i header_of[2];  // which header each row of the two halves of a block has

    BlockReader() {
        alignas(64) float both[2][16] = {};
        for (int set = 0; set < 2; ++set)
            for (int digit = 0; digit < 16; ++digit) both[set][digit] = BLOCK_LEVELS[set][digit < 9 ? digit : 9];
        for (int set = 0; set < 2; ++set) levels[set] = _mm512_load_ps(both[set]);
        for (int part = 0; part < 4; ++part) scales[part] = _mm512_loadu_ps(BLOCK_SCALES + part * 16);
    }

    void set_block(int block) {
        alignas(64) int32_t places[32];
        for (int r = 0; r < 32; ++r) places[r] = (block * 32 + r) / BLOCK_SIDE - block * 32 / BLOCK_SIDE;
        header_of[0] = _mm512_load_si512(places), header_of[1] = _mm512_load_si512(places + 16);
    }

    // Of one strip of 6 columns and a half of the block: scales with their signs, and 16 in the lanes that have the second set of levels.
    struct Strip {
        __m512 scale;
        __m512i set;
    };
    Strip strip(const uint8_t* headers, int half) const {
        const __m512i eight = _mm512_castsi256_si512(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)headers)));
        const __m512i header = _mm512_permutexvar_epi32(header_of[half], eight);
        const __m512 low = _mm512_permutex2var_ps(scales[0], header, scales[1]);  // by the lowest five bits
        const __m512 high = _mm512_permutex2var_ps(scales[2], header, scales[3]);
        const __m512 scale = _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(header, _mm512_set1_epi32(32)), high);
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(header, 7), 31);
        const __m512i set = _mm512_and_si512(_mm512_srli_epi32(header, 2), _mm512_set1_epi32(16));
        return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(scale), sign)), set};
    }

    // The levels of the digits that begin at bit 4 * place of each word.
    __m512 level(__m512i words, int place, __m512i set) const {
        const __m512i digit = _mm512_srli_epi32(words, (unsigned)(place * 4));
        // (digit & 15) | set
        return _mm512_permutex2var_ps(levels[0], _mm512_ternarylogic_epi32(digit, _mm512_set1_epi32(15), set, 0xea), levels[1]);
    }
};

}  // namespace
}  // namespace orchard
