// Many rows of activations at once, by the matrix units of recent Intel processors (AMX, bfloat16).
//
// A tile holds 16 rows of 64 bytes. Activations are packed in strips of 32 rows and steps of 32 columns:
// [strip][step][32 rows][32 columns]; a panel of weights is [block][step][half of the block][16 pairs of columns][16 rows][2].
// Both give two tiles one after the other, and each step multiplies two by two of them: four loads for four products, which
// keeps the unit busy as long as loads come from the nearest caches.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "blocks_avx512.h"

namespace orchard {
namespace {

constexpr int STEP_BYTES = 2048;  // 32 rows × 32 columns of bfloat16: two tiles
// Most steps that are added up before the sums go back to memory. Longer rows are cut, so that the part of a panel in use
// stays in the second cache while the strips of activations pass by.
constexpr int CHUNK = 48;

int steps_of(int cols) { return (cols + 31) / 32; }
// A last group that is padded may reach further than the last step of activations.
int panel_steps(const Weight& w) { return steps_of(w.width ? w.width : w.padded_cols()); }

// The configuration is data of the program and not built on the stack, and `begin` names all of it: g++ 12's own intrinsic tells
// the compiler about the first eight bytes only, so that stores to the others may be dropped.
struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64, "the processor reads 64 bytes");
const TileConfiguration CONFIGURATION;

void begin() { __asm__ volatile("ldtilecfg %0" ::"m"(CONFIGURATION)); }
void end() { __asm__ volatile("tilerelease" ::: "memory"); }

// Tile loads do not tell the compiler that they read memory; nothing may be stored late across this line.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

size_t packed_bytes(int T, int cols) { return (size_t)((T + 31) / 32) * steps_of(cols) * STEP_BYTES; }

inline __mmask16 first_lanes(int count) {
    return count >= 16 ? (__mmask16)0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : (__mmask16)0;
}

void pack(const float* x, int ldx, int T, int cols, int first, int last, void* packed) {
    const int steps = steps_of(cols);
    const int until = last == T ? (T + 31) / 32 * 32 : last;
    for (int t = first; t < until; ++t) {
        uint8_t* to = (uint8_t*)packed + (size_t)(t / 32) * steps * STEP_BYTES + (t % 32) * 64;
        const float* from = x + (size_t)t * ldx;
        for (int s = 0; s < steps; ++s, to += STEP_BYTES) {
            if (t >= T) {
                _mm512_storeu_si512(to, _mm512_setzero_si512());
                continue;
            }
            const int left = cols - s * 32;
            const __m512 low = _mm512_maskz_loadu_ps(first_lanes(left), from + s * 32);
            const __m512 high = _mm512_maskz_loadu_ps(first_lanes(left - 16), from + s * 32 + 16);
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

size_t panel_bytes(const Weight& w, int blocks) { return (size_t)blocks * panel_steps(w) * STEP_BYTES; }

// Where the pair of columns (2 * pair, 2 * pair + 1) of one half lies in a block's panel.
inline uint8_t* pair_at(uint8_t* block, int pair, int half) {
    return block + (size_t)(pair / 16) * STEP_BYTES + half * 1024 + pair % 16 * 64;
}

// Two columns of 16 rows → words of (left, right), rounded to nearest even.
inline void store_pair(uint8_t* to, __m512 left, __m512 right) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                                20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(right, left)));
}

// Codes stay where they are in their words: the one that begins at bit n is 2^n times too large, and its scale 2^n times smaller.
// Only the highest, which would be taken for a sign, is moved down.
template <int BITS>
struct Decoder {
    static constexpr int PLACES = 32 / BITS;
    __m512 scale[PLACES], offset;

    void set(__m512 group_scale, __m512 group_offset) {
        offset = group_offset;
#pragma GCC unroll 16
        for (int place = 0; place < PLACES; ++place)
            scale[place] = _mm512_mul_ps(group_scale, _mm512_set1_ps(place == PLACES - 1 ? 1.0f : 1.0f / (1u << (place * BITS))));
    }
    // The products are exact, so this rounds once, where scale * (code - zero) + minimum does.
    __m512 value(__m512i words, int place) const {
        const __m512i code = place == PLACES - 1
                                 ? _mm512_srli_epi32(words, 32 - BITS)
                                 : _mm512_and_si512(words, _mm512_set1_epi32((int)(((1u << BITS) - 1) << (place * BITS))));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale[place], offset);
    }
};

template <int BITS, bool MINIMUM>
void panel_of_block(const Weight& w, const uint8_t* from, uint8_t* to) {
    constexpr int PARTS = 8 / BITS, HEADER = MINIMUM ? 128 : 64;
    const int group = w.group, groups = w.padded_cols() / group, chunks = group * BITS / 32;
    const size_t group_bytes = w.group_bytes();
    const __m512 zero = _mm512_set1_ps(-zero_of(w.kind, MINIMUM));
    Decoder<BITS> decoder;
    for (int g = 0; g < groups; ++g, from += group_bytes) {
        for (int half = 0; half < 2; ++half) {
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + half * 32)));
            decoder.set(scale, MINIMUM ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 64 + half * 32)))
                                       : _mm512_mul_ps(scale, zero));
            for (int c = 0; c < chunks; ++c) {
                const uint8_t* const codes = from + HEADER + c * 128 + half * 64;
                const __m512i words = _mm512_loadu_si512(codes);
                _mm_prefetch((const char*)codes + AHEAD / 2, _MM_HINT_T0);
                uint8_t* const out = pair_at(to, g * (group / 2) + c * PARTS * 2, half);
#pragma GCC unroll 8
                for (int pair = 0; pair < PARTS * 2; ++pair) {  // columns 2 * pair and the next: bytes 0, 1 or 2, 3 of each word
                    const int place = pair % 2 * 2 * PARTS + pair / 2;
                    store_pair(out + pair * 64, decoder.value(words, place), decoder.value(words, place + PARTS));
                }
            }
        }
    }
}

// Entries are looked up by the lowest bits of a word: the table stands there as often as a register has room for it.
template <int BITS>
void panel_of_palette(const Weight& w, const uint8_t* from, uint8_t* to) {
    constexpr int PARTS = 8 / BITS;
    const int chunks = w.padded_cols() * BITS / 32;
    for (int half = 0; half < 2; ++half) {
        alignas(32) uint16_t entries[16];
        for (int i = 0; i < 16; ++i) entries[i] = half_at(from + half * 32, i & ((1 << BITS) - 1));
        const __m512 table = _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)entries));
        auto value = [&](__m512i words, int place) {
            return _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)(place * BITS)), table);
        };
        for (int c = 0; c < chunks; ++c) {
            const uint8_t* const codes = from + 64 + c * 128 + half * 64;
            const __m512i words = _mm512_loadu_si512(codes);
            _mm_prefetch((const char*)codes + AHEAD / 2, _MM_HINT_T0);
            uint8_t* const out = pair_at(to, c * PARTS * 2, half);
#pragma GCC unroll 8
            for (int pair = 0; pair < PARTS * 2; ++pair) {
                const int place = pair % 2 * 2 * PARTS + pair / 2;
                store_pair(out + pair * 64, value(words, place), value(words, place + PARTS));
            }
        }
    }
}

void panel_of_blocks(const Weight& w, int block, const uint8_t* from, uint8_t* to) {
    BlockReader reader;
    reader.set_block(block);
    for (int c = 0; c < panel_steps(w) * 32; c += w.group, from += 64 + 16 * w.group)
        for (int half = 0; half < 2; ++half)
            for (int two = 0; two < w.group && c + two < panel_steps(w) * 32; two += 2) {  // a strip has three pairs of columns
                uint8_t* const out = pair_at(to, (c + two) / 2, half);
                if (c + two >= w.cols) {
                    _mm512_storeu_si512(out, _mm512_setzero_si512());
                    continue;
                }
                const BlockReader::Strip strip = reader.strip(from + two / BLOCK_SIDE * 8, half);
                const __m512i words = _mm512_loadu_si512(from + 64 + two / 8 * 128 + half * 64);
                store_pair(out, _mm512_mul_ps(reader.level(words, two % 8, strip.set), strip.scale),
                           _mm512_mul_ps(reader.level(words, two % 8 + 1, strip.set), strip.scale));
            }
}

// Columns that a matrix does not have, of an input that it reads a part of, are zeros.
template <class Column>
void panel_of_columns(const Weight& w, uint8_t* to, const Column& column) {
    for (int c = 0; c < panel_steps(w) * 32; c += 2)
        for (int half = 0; half < 2; ++half) {
            auto value = [&](int at) { return at >= 0 && at < w.cols ? column(at, half) : _mm512_setzero_ps(); };
            store_pair(pair_at(to, c / 2, half), value(c - w.from), value(c + 1 - w.from));
        }
}

void panel_of_halves(const Weight& w, int block, const uint8_t* from, uint8_t* to) {
    const int lanes = w.lanes(block);
    panel_of_columns(w, to, [=](int c, int half) {
        if (half * 16 >= lanes) return _mm512_setzero_ps();
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + ((size_t)c * lanes + half * 16) * 2)));
    });
}

void panel_of_floats(const Weight& w, const uint8_t* from, uint8_t* to) {
    panel_of_columns(w, to, [=](int c, int half) { return _mm512_loadu_ps(from + (size_t)c * 128 + half * 64); });
}

void panel_of_bfloats(const Weight& w, const uint8_t* from, uint8_t* to) {
    const int stored = w.padded_cols() / 2;
    for (int pair = 0; pair < steps_of(w.cols) * 16; ++pair)
        for (int half = 0; half < 2; ++half)
            _mm512_storeu_si512(pair_at(to, pair, half), pair < stored ? _mm512_loadu_si512(from + (size_t)pair * 128 + half * 64)
                                                                       : _mm512_setzero_si512());
}

void panel(const Weight& w, int first, int last, void* panel) {
    for (int b = first; b < last; ++b) {
        const uint8_t* const from = w.data + b * w.block_bytes();
        uint8_t* const to = (uint8_t*)panel + (size_t)(b - first) * panel_steps(w) * STEP_BYTES;
        switch (w.kind) {
            case Kind::Q8: w.minimum ? panel_of_block<8, true>(w, from, to) : panel_of_block<8, false>(w, from, to); break;
            case Kind::Q4: w.minimum ? panel_of_block<4, true>(w, from, to) : panel_of_block<4, false>(w, from, to); break;
            case Kind::Q2: w.minimum ? panel_of_block<2, true>(w, from, to) : panel_of_block<2, false>(w, from, to); break;
            case Kind::P4: panel_of_palette<4>(w, from, to); break;
            case Kind::P2: panel_of_palette<2>(w, from, to); break;
            case Kind::BLOCKS: panel_of_blocks(w, b, from, to); break;
            case Kind::F16: panel_of_halves(w, b, from, to); break;
            case Kind::F32: panel_of_floats(w, from, to); break;
            case Kind::BF16: panel_of_bfloats(w, from, to); break;
        }
    }
}

// Eight lines each of what is needed two steps later. Spread between the products, these keep the unit fed from the second
// cache, also where another process keeps pushing things out of the first. Measured on two shared cores: 10 to 15 % less time
// where the processor is busy with others, 5 % more where it is not, because then activations come quickly enough by themselves.
inline void prefetch_lines(const uint8_t* x, const uint8_t* w, int line) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        _mm_prefetch((const char*)w + 2 * STEP_BYTES + (line + i) * 64, _MM_HINT_T0);
        _mm_prefetch((const char*)x + 2 * STEP_BYTES + (line + i) * 64, _MM_HINT_T0);
    }
}

// Two rows of the output, to be written soon: otherwise each line waits for its turn to be fetched when the sums are stored.
inline void prefetch_rows(const uint8_t* out, size_t ldy_bytes) {
    for (int i = 0; i < 2; ++i, out += ldy_bytes) {
        __asm__ volatile("prefetchw %0" ::"m"(out[0]));
        __asm__ volatile("prefetchw %0" ::"m"(out[64]));
    }
}

// 32 rows of weights times 32 (or, without `second`, 16) rows of activations over some steps. Tiles 0-3: sums; 4, 5: activations;
// 6, 7: weights.
template <bool SECOND>
inline void multiply_steps(const uint8_t* x, const uint8_t* w, int steps, float* y, size_t ldy_bytes, bool load) {
    uint8_t* const out = (uint8_t*)y;
    if (load) {
        _tile_loadd(0, out, ldy_bytes);
        _tile_loadd(1, out + 64, ldy_bytes);
        if (SECOND) _tile_loadd(2, out + 16 * ldy_bytes, ldy_bytes);
        if (SECOND) _tile_loadd(3, out + 16 * ldy_bytes + 64, ldy_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (SECOND) _tile_zero(2);
        if (SECOND) _tile_zero(3);
    }
    for (int s = 0; s < steps; ++s, x += STEP_BYTES, w += STEP_BYTES) {
        if (!load && s < (SECOND ? 16 : 8)) prefetch_rows(out + 2 * s * ldy_bytes, ldy_bytes);
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x, 64);
        _tile_loadd(7, w + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_lines(x, w, 0);
        if (SECOND) _tile_loadd(5, x + 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        prefetch_lines(x, w, 8);
        if (SECOND) _tile_dpbf16ps(2, 5, 6);
        prefetch_lines(x, w, 16);
        if (SECOND) _tile_dpbf16ps(3, 5, 7);
        prefetch_lines(x, w, 24);
    }
    _tile_stored(0, out, ldy_bytes);
    _tile_stored(1, out + 64, ldy_bytes);
    if (SECOND) _tile_stored(2, out + 16 * ldy_bytes, ldy_bytes);
    if (SECOND) _tile_stored(3, out + 16 * ldy_bytes + 64, ldy_bytes);
}

// Where the output has fewer than 32 rows of weights or of activations left, sums go through a table on the side.
void multiply_edge(const uint8_t* x, const uint8_t* w, int steps, float* y, int ldy, int count, int rows, bool load) {
    alignas(64) float side[32 * 32];
    if (load) {
        std::memset(side, 0, sizeof side);
        for (int t = 0; t < count; ++t) std::memcpy(side + t * 32, y + (size_t)t * ldy, (size_t)rows * sizeof(float));
        finish_stores();
    }
    if (count > 16)
        multiply_steps<true>(x, w, steps, side, 128, load);
    else
        multiply_steps<false>(x, w, steps, side, 128, load);
    for (int t = 0; t < count; ++t) std::memcpy(y + (size_t)t * ldy, side + t * 32, (size_t)rows * sizeof(float));
}

void multiply(const Weight& w, const void* panel, int first, int last, const void* packed, int T, int row0, int row1, float* y,
              int ldy, bool add) {
    (void)T;
    const int steps = steps_of(w.input_cols()), stride = panel_steps(w);
    finish_stores();
    const int chunks = (steps + CHUNK - 1) / CHUNK, length = (steps + chunks - 1) / chunks;  // equal chunks: none is very short
    for (int from = 0; from < steps; from += length) {
        const int count = steps - from < length ? steps - from : length;
        const bool load = add || from > 0;
        for (int t = row0; t < row1; t += 32) {
            const uint8_t* const x = (const uint8_t*)packed + ((size_t)(t / 32) * steps + from) * STEP_BYTES;
            for (int b = first; b < last; ++b) {
                const uint8_t* const weights = (const uint8_t*)panel + ((size_t)(b - first) * stride + from) * STEP_BYTES;
                const int rows = w.rows - b * 32 < 32 ? w.rows - b * 32 : 32;
                float* const to = y + (size_t)t * ldy + (b - first) * 32;
                if (rows == 32 && row1 - t >= 32)
                    multiply_steps<true>(x, weights, count, to, (size_t)ldy * sizeof(float), load);
                else
                    multiply_edge(x, weights, count, to, ldy, row1 - t < 32 ? row1 - t : 32, rows, load);
            }
        }
    }
}

}  // namespace

extern const MatrixKernels MATRIX_AMX = {"amx-bf16", begin, end, packed_bytes, pack, panel_bytes, panel, multiply};

}  // namespace orchard
