// Quantised matrices times several rows of activations by integer matrix tiles (AMX).
//
// Sums of products of codes and digits are whole numbers, so tiles and the dot products of linear_avx512.cpp give the same ones, and
// what follows is done with the same operations in the same order: a row gets the same bits here, there, alone or among others.
//
// Codes of a stretch of columns are unpacked once, into the layout of right-hand tiles: four columns of 16 rows of the matrix are a
// row of a tile. Codes of up to 4 bits stand in a tile twice, times BASE for the high digits of 32 columns and as they are for the
// low ones, so that one product adds up both. Codes of 8 bits times BASE would be no byte: there digits have results of their own,
// and codes are taken from where they are.
// Then the rows of activations pass by, 16 at a time. A stretch is short enough that codes and digits stay in the nearest cache.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says so of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <stdlib.h>

#include <algorithm>

#include "linear_common.h"

namespace orchard {

extern const LinearKernels LINEAR_AVX512, LINEAR_AMX;

namespace {

constexpr int TOKENS = 16;    // rows of activations that pass by together
constexpr int FEWEST = 13;    // from so many on tiles are quicker than dot products, all in all
constexpr int MOST = 64;      // rows of activations in one call
constexpr int COLUMNS = 32;   // of a tile
constexpr int STRETCH = 128, LONG_STRETCH = 512;  // columns, or one group where that is longer; the second where nothing is unpacked
constexpr int TILES_AHEAD = 12288;  // bytes between the codes that are unpacked and those that are asked for
constexpr int LONGEST = 8192;  // columns of a group whose dot products of each digit are exact as float32: 15 * 127 * 8192 < 2^24

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
thread_local Room codes_room, scales_room;

struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Tiles 0 to 3: results; 4 and 6: codes; 5 and 7: digits.
void configure(int tokens, bool apart) {
    const uint16_t wide = apart ? COLUMNS : 2 * COLUMNS;
    alignas(64) TileShapes shapes = {1, 0, {0}, {64, 64, 64, 64, 64, wide, 64, wide}, {0}};
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = (uint8_t)(tile == 4 || tile == 6 ? wide / 4 : tokens);
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));  // g++'s intrinsic takes no notice that all of it is read
}

inline void written() { __asm__ volatile("" ::: "memory"); }  // g++ does not know that tile loads read memory

inline __m512 halves_to_floats(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)from)); }

constexpr int TILE_BYTES = 1024;  // between codes of 32 columns and of the next 32, as unpacked or as stored in 8 bits

// Codes of one group as right-hand tiles: those of the first 16 rows at `to`, of the others `apart` bytes on.
template <int BITS>
void unpack(const uint8_t* codes, int group, uint8_t* to, size_t apart) {
    constexpr int PARTS = 8 / BITS, CHUNKS = BITS;  // codes in a byte; chunks of 32 columns
    const __m512i low = _mm512_set1_epi8((char)((1 << BITS) - 1)), high = _mm512_slli_epi16(low, 4);
    for (int done = 0; done < group; done += COLUMNS, to += TILE_BYTES)
        for (int c = 0; c < CHUNKS; ++c, codes += 128)
            for (int h = 0; h < 2; ++h) {
                const __m512i word = _mm512_load_si512(codes + h * 64);
                uint8_t* out = to + h * apart + c * PARTS * 64;
#pragma GCC unroll 4
                for (int j = 0; j < PARTS; ++j) {
                    const int up = 4 - j * BITS;
                    const __m512i times = up > 0 ? _mm512_slli_epi16(word, up > 0 ? up : 0) : _mm512_srli_epi16(word, up < 0 ? -up : 0);
                    _mm512_store_si512(out + j * 64, _mm512_and_si512(times, high));
                    _mm512_store_si512(out + 512 + j * 64, _mm512_and_si512(_mm512_srli_epi16(word, j * BITS), low));
                }
            }
}

// Scales of 16 rows by group, and their sums or, without minima, what the zero point takes off: [groups][2][16]. Rows that are not
// there are like the first: what they give is dropped.
template <bool MINIMUM>
void arrange_scales(const QuantRows& x, int tokens, int groups, float zero, float* to) {
    for (int t = 0; t < TOKENS; ++t) {
        const size_t row = (size_t)(t < tokens ? t : 0) * x.ldg;
        for (int g = 0; g < groups; ++g) {
            to[(size_t)g * 2 * TOKENS + t] = x.scale[row + g];
            to[(size_t)g * 2 * TOKENS + TOKENS + t] = MINIMUM ? x.sum[row + g] : x.sum[row + g] * zero;
        }
    }
}

// Dot products of 16 rows of a matrix: of two groups, or of the two digits of one. Two of these fill 4 kB and no more: a processor
// takes a load for one that must wait for a store when their addresses are equal in the last 12 bits.
struct Dots {
    alignas(64) int32_t of[2][TOKENS][16];
};

// Where codes and digits of a stretch are. Rows of digits are `apart` bytes from each other.
struct Stretch {
    int group;           // columns of a group
    size_t group_codes;  // bytes from a group's codes to the next
    const uint8_t* codes;
    const int8_t* digits;
    size_t apart;
};

// A product takes long to come, so several are under way at once: their codes and digits alternate between two pairs of tiles.
#define ORCHARD_PRODUCT(result, codes_tile, digits_tile, of, low)                                                   \
    _tile_loadd(codes_tile, s.codes + (size_t)(of) * s.group_codes + at * TILE_BYTES, APART ? 128 : 64);            \
    _tile_loadd(digits_tile, s.digits + ((size_t)(of) * s.group + at * COLUMNS) * 2 + (low), s.apart);              \
    _tile_dpbsud(result, digits_tile, codes_tile);

// The next two groups (where there is only one, that one twice), or both digits of one.
template <bool APART, bool ODD>
inline void multiply(const Stretch& s, int first, int left) {
    const int second = APART || left < 2 ? first : first + 1, low = APART ? 32 : 0;
    if (ODD) {
        _tile_zero(2);
        _tile_zero(3);
        for (int at = 0; at < s.group / COLUMNS; ++at) {
            ORCHARD_PRODUCT(2, 4, 5, first, 0)
            ORCHARD_PRODUCT(3, 6, 7, second, low)
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        for (int at = 0; at < s.group / COLUMNS; ++at) {
            ORCHARD_PRODUCT(0, 4, 5, first, 0)
            ORCHARD_PRODUCT(1, 6, 7, second, low)
        }
    }
}

// By hand, as the intrinsic declares that any memory may have changed, and then g++ keeps sums in memory too.
template <bool ODD>
inline void store(Dots& dots) {
    const size_t stride = 64;
    if (ODD)
        __asm__ volatile("tilestored %%tmm2, (%1,%3,1)\n\ttilestored %%tmm3, (%2,%3,1)" : "=m"(dots) : "r"(dots.of[0]), "r"(dots.of[1]), "r"(stride));
    else
        __asm__ volatile("tilestored %%tmm0, (%1,%3,1)\n\ttilestored %%tmm1, (%2,%3,1)" : "=m"(dots) : "r"(dots.of[0]), "r"(dots.of[1]), "r"(stride));
}

// The same operations in the same order as linear_q_rows of linear_avx512.cpp.
template <bool MINIMUM, bool APART, int ROWS>
inline __attribute__((always_inline)) void add_group(const uint8_t* header, const int32_t (*dots)[TOKENS][16], const float* of_x, __m512 (&sums)[ROWS]) {
    const __m512 scale = halves_to_floats(header), minimum = MINIMUM ? halves_to_floats(header + 64) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
        __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[0][t]));
        if (APART) dot = _mm512_fmadd_ps(dot, _mm512_set1_ps(BASE), _mm512_cvtepi32_ps(_mm512_load_si512(dots[1][t])));
        const __m512 x_scale = _mm512_set1_ps(of_x[t]), other = _mm512_set1_ps(of_x[TOKENS + t]);
        const __m512 part = MINIMUM ? _mm512_mul_ps(dot, x_scale) : _mm512_fmsub_ps(dot, x_scale, other);
        sums[t] = _mm512_fmadd_ps(part, scale, sums[t]);
        if (MINIMUM) sums[t] = _mm512_fmadd_ps(minimum, other, sums[t]);
    }
}

// What `multiply` gave: two groups, or one where digits are apart; `left`: groups that there are.
template <bool MINIMUM, bool APART, int ROWS>
inline __attribute__((always_inline)) void add_groups(const uint8_t* header, size_t group_bytes, int left, const Dots& dots, const float* of_x,
                                                      __m512 (&sums)[ROWS]) {
    if (left > 0) add_group<MINIMUM, APART, ROWS>(header, dots.of, of_x, sums);
    if (!APART && left > 1) add_group<MINIMUM, APART, ROWS>(header + group_bytes, dots.of + 1, of_x + 2 * TOKENS, sums);
}

// Some groups of 16 rows of a matrix for up to 16 rows of activations; `kept` are their sums so far. `header`: scales of the first.
template <bool MINIMUM, bool APART, int ROWS>
void some_tokens(const Stretch& s, int groups, const uint8_t* header, size_t group_bytes, const float* of_x, float (*kept)[32]) {
    constexpr int SOME = APART ? 1 : 2;
    __m512 sums[ROWS];
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) sums[t] = _mm512_load_ps(kept[t]);
    alignas(4096) Dots dots[2];
    multiply<APART, false>(s, 0, groups);
    store<false>(dots[0]);
    // Some groups are multiplied while those before are added up.
    for (int g = 0; g < groups; g += 2 * SOME) {
        const int left = groups - g;
        if (left > SOME) multiply<APART, true>(s, g + SOME, left - SOME);
        add_groups<MINIMUM, APART, ROWS>(header, group_bytes, left, dots[0], of_x, sums);
        if (left <= SOME) break;
        store<true>(dots[1]);
        if (left > 2 * SOME) multiply<APART, false>(s, g + 2 * SOME, left - 2 * SOME);
        add_groups<MINIMUM, APART, ROWS>(header + SOME * group_bytes, group_bytes, left - SOME, dots[1], of_x + SOME * 2 * TOKENS, sums);
        if (left > 2 * SOME) store<false>(dots[0]);
        header += 2 * SOME * group_bytes, of_x += 2 * SOME * 2 * TOKENS;
    }
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) _mm512_store_ps(kept[t], sums[t]);
}

// Sums of one block for rows [first, last) of activations, those of row `at` first in `kept`.
void finish(const Weight& w, int block, const float (*kept)[32], int at, int first, int last, float* y, int ldy, bool add) {
    for (int t = first; t < last; ++t)
        for (int h = 0; h < 2; ++h) {
            const int row = block * 32 + h * 16, real = w.rows - row;
            if (real <= 0) continue;
            const __mmask16 mask = real >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << real) - 1);
            float* to = y + (size_t)t * ldy + row;
            __m512 sum = _mm512_load_ps(kept[t - at] + h * 16);
            if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
            _mm512_mask_storeu_ps(to, mask, sum);
        }
}

template <int BITS, bool MINIMUM>
void blocks(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    constexpr bool APART = BITS == 8;
    constexpr int HEADER = MINIMUM ? 128 : 64;
    const int groups = w.padded_cols() / w.group, passes = (T + TOKENS - 1) / TOKENS;
    const size_t group_bytes = w.group_bytes(), block_bytes = w.block_bytes();
    const uint8_t* const end = w.data + last * block_bytes;
    const int stretch = std::max(1, (APART ? LONG_STRETCH : STRETCH) / w.group);  // groups
    const size_t group_codes = APART ? group_bytes : (size_t)w.group / COLUMNS * TILE_BYTES;
    const size_t half_codes = APART ? 64 : group_codes * stretch;
    uint8_t* const unpacked = APART ? nullptr : codes_room.of(2 * half_codes);
    float* const of_x = (float*)scales_room.of((size_t)2 * TOKENS * 4 * groups * passes);
    // The last pass goes back far enough to be full, if there are enough rows; what it gives twice is equal.
    auto begin = [&](int p) { return p && (p + 1) * TOKENS > T ? T - TOKENS : p * TOKENS; };
    for (int p = 0; p < passes; ++p)
        arrange_scales<MINIMUM>(x.from(begin(p)), T - begin(p), groups, zero_of(w.kind, MINIMUM), of_x + (size_t)2 * TOKENS * groups * p);
    configure(T < TOKENS ? T : TOKENS, APART);
    auto pass = T > 8 ? some_tokens<MINIMUM, APART, 16> : some_tokens<MINIMUM, APART, 8>;
    alignas(64) float kept[MOST][32];
    for (int b = first; b < last; ++b) {
        memset(kept, 0, (size_t)passes * TOKENS * sizeof(kept[0]));
        for (int from = 0; from < groups; from += stretch) {
            const int some = groups - from < stretch ? groups - from : stretch;
            const uint8_t* const header = w.data + b * block_bytes + from * group_bytes;
            if (header + TILES_AHEAD + some * group_bytes <= end)  // nothing past this call's blocks: another thread reads that
                for (size_t line = 0; line < some * group_bytes; line += 64) _mm_prefetch((const char*)(header + TILES_AHEAD + line), _MM_HINT_T0);
            const uint8_t* codes = header + HEADER;
            if constexpr (!APART) {
                for (int g = 0; g < some; ++g) unpack<BITS>(codes + g * group_bytes, w.group, unpacked + g * group_codes, half_codes);
                codes = unpacked;
                written();
            }
            for (int p = 0; p < passes; ++p)
                for (int h = 0; h < 2; ++h) {
                    const Stretch s = {w.group, group_codes, codes + h * half_codes, x.from(begin(p)).digits + 2 * from * w.group, (size_t)x.ldd};
                    pass(s, some, header + h * 32, group_bytes, of_x + (size_t)2 * TOKENS * (groups * p + from),
                         (float(*)[32])(kept[p * TOKENS] + h * 16));
                }
        }
        for (int p = 0; p < passes; ++p) {
            const int upto = (p + 1) * TOKENS < T ? (p + 1) * TOKENS : T;
            finish(w, b, kept + p * TOKENS, begin(p), p * TOKENS, upto, y, ldy, add);
        }
    }
    _tile_release();
}

void linear_q(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add) {
    // Rows that do not fill a tile well go the other way, with the same result; entries of palettes are too large for tiles.
    const int rest = w.group > LONGEST || w.palette() ? T : T % TOKENS < FEWEST ? T % TOKENS : 0, by_tiles = T - rest;
    if (rest) LINEAR_AVX512.linear_q(w, first, last, x.from(by_tiles), rest, y + (size_t)by_tiles * ldy, ldy, add);
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

void quantise(const float* x, int cols, int padded, int group, int8_t* digits, float* scale, float* sum) {
    LINEAR_AVX512.quantise(x, cols, padded, group, digits, scale, sum);
}

void linear_f(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add) {
    LINEAR_AVX512.linear_f(w, first, last, x, ldx, T, y, ldy, add);
}

}  // namespace

extern const LinearKernels LINEAR_AMX = {"avx512-vnni and amx-int8", MOST, quantise, linear_q, linear_f, plain_row};

}  // namespace orchard
