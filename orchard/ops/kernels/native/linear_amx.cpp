// Quantised matrices times several rows of activations by integer matrix tiles (AMX).
//
// Sums of products of codes and digits are whole numbers, so tiles and the dot products of linear_avx512.cpp give the same ones, and
// what follows is done with the same operations in the same order: a row gets the same bits here, there, alone or among others.
//
// Codes of a stretch of columns are unpacked once, into the layout of right-hand tiles: four columns of 16 rows of the matrix are a
// row of a tile. Then the rows of activations pass by, eight at a time: their high and low digits are the 16 rows of a left-hand
// tile. A stretch is short enough that codes and digits stay in the nearest cache.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says so of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <stdlib.h>

#include <initializer_list>

#include "linear_common.h"

namespace orchard {

extern const LinearKernels LINEAR_AVX512, LINEAR_AMX;

namespace {

constexpr int TOKENS = 8;  // rows of activations that pass by together
constexpr int FEWEST = 5;  // from so many on tiles are quicker than dot products
constexpr int MOST = 64;   // rows of activations in one call
constexpr int STRETCH = 512;  // columns, or one group where that is longer

// Memory of one thread, which only grows.
struct Room {
    uint8_t* at = nullptr;
    size_t bytes = 0;
    ~Room() { free(at); }
    uint8_t* of(size_t wanted) {
        if (wanted > bytes) {
            free(at);
            bytes = (wanted + 4095) / 4096 * 4096;
            at = (uint8_t*)aligned_alloc(64, bytes);
            if (!at) abort();  // a few hundred kilobytes: nothing could go on without them
        }
        return at;
    }
};
thread_local Room codes_room, digits_room, scales_room;

struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Tiles 0 and 1: results of the two halves; 2: digits; 3 and 4: codes of the halves.
constexpr TileShapes shapes(uint8_t columns) {
    const uint8_t four = columns / 4;
    return {1, 0, {0}, {64, 64, columns, 64, 64}, {16, 16, 16, four, four}};
}

// Constants, because g++ takes no notice that the instruction reads all of it.
alignas(64) const TileShapes NARROW = shapes(32), WIDE = shapes(64);

inline void written() { __asm__ volatile("" ::: "memory"); }  // g++ does not know that tile loads read memory

inline __m512 halves_to_floats(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)from)); }

// What the loops below need to know of a matrix.
struct Shape {
    int group, step, header;  // columns of a group, columns of a tile, bytes before a group's codes
    size_t group_bytes;
    float zero;
};

template <int BITS>
void unpack(const uint8_t* codes, int group, const uint8_t* ahead, uint8_t* to) {
    constexpr int PARTS = 8 / BITS;
    const __m512i mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    const int chunks = group * BITS / 32;
    for (int c = 0; c < chunks; ++c)
        for (int h = 0; h < 2; ++h) {
            _mm_prefetch((const char*)(ahead + c * 128 + h * 64), _MM_HINT_T0);
            const __m512i word = _mm512_load_si512(codes + c * 128 + h * 64);
            uint8_t* out = to + (size_t)h * group * 16 + (size_t)c * PARTS * 64;
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; ++j)
                _mm512_store_si512(out + j * 64, BITS == 8 ? word : _mm512_and_si512(_mm512_srli_epi16(word, j * BITS), mask));
        }
}

// Digits of eight rows as left-hand tiles, one after another: [columns / step][16][step], high digits first. Rows that are not
// there are zeros.
void arrange(const QuantRows& x, int tokens, int columns, int step, uint8_t* to) {
    for (int c = 0; c < columns; c += step)
        for (int d = 0; d < 2; ++d)
            for (int t = 0; t < TOKENS; ++t, to += step) {
                const int8_t* from = (d ? x.low : x.q) + (size_t)t * x.ldq + c;
                for (int i = 0; i < step; i += 32)
                    _mm256_store_si256((__m256i*)(to + i), t < tokens ? _mm256_load_si256((const __m256i*)(from + i)) : _mm256_setzero_si256());
            }
}

// Scales and sums of eight rows by group: [groups][2][8]. Rows that are not there are like the first: what they give is dropped.
void arrange_scales(const QuantRows& x, int tokens, int groups, float* to) {
    for (int g = 0; g < groups; ++g)
        for (const float* of : {x.scale, x.sum})
            for (int t = 0; t < TOKENS; ++t) *to++ = of[(size_t)(t < tokens ? t : 0) * x.ldg + g];
}

// Dot products of one group: [half][digit][token][16].
struct Dots {
    alignas(64) int32_t of[2][2][TOKENS][16];
};

template <int STEP>
inline void multiply(int group, const uint8_t* codes, const uint8_t* digits, Dots& dots) {
    _tile_zero(0);
    _tile_zero(1);
    int c = 0;
    do {
        _tile_loadd(2, digits + c * 16, STEP);
        _tile_loadd(3, codes + c * 16, 64);
        _tile_dpbsud(0, 2, 3);
        _tile_loadd(4, codes + (size_t)group * 16 + c * 16, 64);
        _tile_dpbsud(1, 2, 4);
    } while ((c += STEP) < group);
    _tile_stored(0, dots.of[0], 64);
    _tile_stored(1, dots.of[1], 64);
}

// The same operations in the same order as linear_q_rows of linear_avx512.cpp.
template <bool MINIMUM>
inline void add_group(const uint8_t* header, const Dots& dots, float zero, const float* of_x, __m512 (&sums)[TOKENS][2]) {
    __m512 scale[2], minimum[2];
    for (int h = 0; h < 2; ++h) {
        scale[h] = halves_to_floats(header + h * 32);
        if (MINIMUM) minimum[h] = halves_to_floats(header + 64 + h * 32);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
        const __m512 x_scale = _mm512_set1_ps(of_x[t]), x_sum = _mm512_set1_ps(of_x[TOKENS + t]);
        const __m512 shift = _mm512_mul_ps(x_sum, _mm512_set1_ps(zero));
        for (int h = 0; h < 2; ++h) {
            const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(dots.of[h][0][t]));
            const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(dots.of[h][1][t]));
            const __m512 dot = _mm512_fmadd_ps(high, _mm512_set1_ps(BASE), low);
            const __m512 part = MINIMUM ? _mm512_mul_ps(dot, x_scale) : _mm512_fmsub_ps(dot, x_scale, shift);
            sums[t][h] = _mm512_fmadd_ps(part, scale[h], sums[t][h]);
            if (MINIMUM) sums[t][h] = _mm512_fmadd_ps(minimum[h], x_sum, sums[t][h]);
        }
    }
}

// Groups [from, to) of one block for eight rows of activations; `kept` are their sums so far.
template <bool MINIMUM, int STEP>
void some_tokens(const Shape& shape, const uint8_t* block, int from, int to, const uint8_t* codes, const uint8_t* digits,
                 const float* of_x, float (*kept)[32]) {
    __m512 sums[TOKENS][2];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) sums[t][0] = _mm512_load_ps(kept[t]), sums[t][1] = _mm512_load_ps(kept[t] + 16);
    Dots dots[2];
    const int group = shape.group;
    multiply<STEP>(group, codes, digits, dots[from & 1]);
    // One group is multiplied while the one before is added up: results of tiles take long to come.
    for (int g = from; g < to; ++g, of_x += 2 * TOKENS) {
        codes += group * 32, digits += group * 16;
        if (g + 1 < to) multiply<STEP>(group, codes, digits, dots[~g & 1]);
        __asm__ volatile("" : "+m"(dots[g & 1]));  // tiles wrote it
        add_group<MINIMUM>(block + g * shape.group_bytes, dots[g & 1], shape.zero, of_x, sums);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) _mm512_store_ps(kept[t], sums[t][0]), _mm512_store_ps(kept[t] + 16, sums[t][1]);
}

inline QuantRows from_row(QuantRows x, int t) {
    x.q += (size_t)t * x.ldq, x.low += (size_t)t * x.ldq, x.scale += (size_t)t * x.ldg, x.sum += (size_t)t * x.ldg;
    return x;
}

template <int BITS, bool MINIMUM>
void blocks(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    Shape shape;
    shape.group = w.group, shape.step = w.group % 64 ? 32 : 64, shape.header = MINIMUM ? 128 : 64;
    shape.group_bytes = w.group_bytes(), shape.zero = zero_of(w.kind, MINIMUM);
    const int columns = w.padded_cols(), groups = columns / w.group;
    const size_t block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    const int stretch = w.group > STRETCH ? 1 : STRETCH / w.group;  // groups
    uint8_t* const codes = codes_room.of((size_t)32 * w.group * stretch);
    uint8_t* const digits = digits_room.of((size_t)16 * columns * ((T + TOKENS - 1) / TOKENS));
    float* const of_x = (float*)scales_room.of((size_t)2 * TOKENS * 4 * groups * ((T + TOKENS - 1) / TOKENS));
    for (int t = 0; t < T; t += TOKENS) {
        arrange(from_row(x, t), T - t, columns, shape.step, digits + (size_t)2 * t * columns);
        arrange_scales(from_row(x, t), T - t, groups, of_x + (size_t)2 * t * groups);
    }
    _tile_loadconfig(shape.step == 64 ? &WIDE : &NARROW);
    alignas(64) float kept[MOST][32];
    for (int b = first; b < last; ++b) {
        const uint8_t* block = w.data + b * block_bytes;
        memset(kept, 0, sizeof(kept));
        for (int from = 0; from < groups; from += stretch) {
            const int to = from + stretch < groups ? from + stretch : groups;
            for (int g = from; g < to; ++g) {
                const uint8_t* packed = block + g * shape.group_bytes + shape.header;
                const uint8_t* ahead = packed + AHEAD + shape.group_bytes <= end ? packed + AHEAD : packed;
                unpack<BITS>(packed, w.group, ahead, codes + (size_t)(g - from) * w.group * 32);
            }
            written();
            for (int t = 0; t < T; t += TOKENS) {
                auto some = shape.step == 64 ? some_tokens<MINIMUM, 64> : some_tokens<MINIMUM, 32>;
                some(shape, block, from, to, codes, digits + (size_t)2 * t * columns + (size_t)16 * from * w.group,
                     of_x + (size_t)2 * t * groups + (size_t)2 * TOKENS * from, kept + t);
            }
        }
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < 2; ++h) {
                const int row = b * 32 + h * 16, real = w.rows - row;
                if (real <= 0) continue;
                const __mmask16 mask = real >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << real) - 1);
                float* to = y + (size_t)t * ldy + row;
                __m512 sum = _mm512_load_ps(kept[t] + h * 16);
                if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
                _mm512_mask_storeu_ps(to, mask, sum);
            }
    }
    _tile_release();
}

void linear_q(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    // Rows that do not fill a tile well go the other way, with the same result.
    const int rest = T % TOKENS < FEWEST ? T % TOKENS : 0, by_tiles = T - rest;
    if (rest) LINEAR_AVX512.linear_q(w, first, last, from_row(x, by_tiles), rest, y + (size_t)by_tiles * ldy, ldy, add);
    if (!by_tiles) return;
    switch (w.kind) {
        case Kind::Q8: return w.minimum ? blocks<8, true>(w, first, last, x, by_tiles, y, ldy, add)
                                        : blocks<8, false>(w, first, last, x, by_tiles, y, ldy, add);
        case Kind::Q4: return w.minimum ? blocks<4, true>(w, first, last, x, by_tiles, y, ldy, add)
                                        : blocks<4, false>(w, first, last, x, by_tiles, y, ldy, add);
        default: return w.minimum ? blocks<2, true>(w, first, last, x, by_tiles, y, ldy, add)
                                  : blocks<2, false>(w, first, last, x, by_tiles, y, ldy, add);
    }
}

void quantise(const float* x, int cols, int padded, int group, int8_t* q, int8_t* low, float* scale, float* sum) {
    LINEAR_AVX512.quantise(x, cols, padded, group, q, low, scale, sum);
}

void linear_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    LINEAR_AVX512.linear_f(w, first, last, x, ldx, T, y, ldy, add);
}

}  // namespace

extern const LinearKernels LINEAR_AMX = {"avx512-vnni and amx-int8", MOST, quantise, linear_q, linear_f, plain_row};

}  // namespace orchard
