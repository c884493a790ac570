// Attention of a run of queries by matrix tiles (AMX, bfloat16), for prefill. The layouts of a store are those of the tiles:
// a block of 16 keys is a stack of B tiles, 32 slots of values are a row of them.
//
// Query heads that share a key head are cut into tiles of 16 queries; two such tiles go through the slots together. Slots come in
// groups of 32, ROUND groups to a round: scores by tiles, a softmax relative to the largest score so far, values by
// tiles. Groups that nobody sees are left out, and only those that somebody does not see are masked.
//
// A store of 8 bits is unpacked for a run of queries, as bfloat16 in the same order.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says so of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "attention_powers.h"
#include "kernels.h"

namespace orchard {

extern const AttentionKernels attention_avx512, attention_amx;

namespace {

constexpr int ROWS = 16;   // queries per tile
constexpr int GROUP = 32;  // slots per group: two tiles of keys, one row of tiles of values
constexpr int ROUND = 8;   // groups per round: scores and weights of a round stay in the nearest cache

constexpr float SLACK = 8;       // how far (in powers of two) scores may rise above the base before it is moved
constexpr float LOWEST = -1e30f;  // the base of a query that has seen nothing: far below any score, and no infinity

// g++ takes no notice that ldtilecfg reads all 64 bytes and that tileloadd reads memory at all. So the configuration is a
// constant, which cannot be half written, and `written()` stands between writing a buffer and loading tiles from it.
struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
alignas(64) const TileShapes SHAPES = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16},
};
inline void written() { __asm__ volatile("" ::: "memory"); }

// Positions in a group of slots; `whole`: all of its slots are in range and hold one.
struct Group {
    int32_t oldest, newest, whole;
};

enum Sight { NOBODY, SOMEBODY, EVERYBODY };

struct Scratch {
    uint16_t* q;     // [2 tiles][width / 32][16][32]
    float* scores;   // [2 tiles][2 * ROUND][16][16]; weights, [16][32] bfloat16, take the place of the first of each two tiles
    float* sums;     // [2 tiles][16][width]
    Group* groups;   // [capacity / 32]
    int32_t* slots;  // [capacity]: positions, for the way round
    uint8_t *k, *v;  // a head of a store of 8 bits as bfloat16, [capacity][width] each
    uint8_t* rest;

    Scratch(const Store& s, void* memory) {
        uint8_t* at = (uint8_t*)(((uintptr_t)memory + 63) / 64 * 64);
        auto take = [&at](size_t bytes) {
            uint8_t* taken = at;
            at += (bytes + 63) / 64 * 64;
            return taken;
        };
        q = (uint16_t*)take((size_t)2 * ROWS * s.width * 2);
        scores = (float*)take((size_t)2 * 2 * ROUND * ROWS * 16 * 4);
        sums = (float*)take((size_t)2 * ROWS * s.width * 4);
        groups = (Group*)take((size_t)s.capacity / GROUP * sizeof(Group));
        slots = (int32_t*)take((size_t)s.capacity * 4);
        const size_t unpacked = s.codec == Codec::INT8 ? (size_t)s.capacity * s.width * 2 : 0;
        k = take(unpacked);
        v = take(unpacked);
        rest = at;
    }
};

size_t many_scratch_bytes(const Store& store, int count) {
    Scratch measured(store, nullptr);
    return (size_t)measured.rest + 64 + attention_avx512.scratch_bytes(store, store.capacity, count);
}

// What is the same for all rows of a run.
struct Run {
    const Store& store;
    const uint8_t *k, *v;  // of the head
    const float* q;
    int ldq, count, T;
    float scale, softcap;
    Visible seen;
    float* out;
    int ldo;
    Scratch scratch;
};

// Sixteen queries of one head.
struct Tile {
    int head, from, rows;
    alignas(64) float base[ROWS];  // scores count relative to it
    alignas(64) float totals[ROWS][16];
};

// ---------------------------------------------------------------------------------------------------------------------
// Who sees what.

// Positions of 16 slots, the largest number there is where there is none: no query comes so late.
inline __m512i positions_of(const Visible& seen, int slot) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i slots = _mm512_add_epi32(_mm512_set1_epi32(slot), iota);
    __mmask16 real = _mm512_cmpge_epi32_mask(slots, _mm512_set1_epi32(seen.first));
    real &= _mm512_cmplt_epi32_mask(slots, _mm512_set1_epi32(seen.last));
    __m512i positions = seen.positions ? _mm512_maskz_loadu_epi32(real, seen.positions + slot) : slots;
    real &= _mm512_cmpge_epi32_mask(positions, _mm512_setzero_si512());
    return _mm512_mask_mov_epi32(_mm512_set1_epi32(INT32_MAX), real, positions);
}

inline __mmask16 sees(const Visible& seen, int query, __m512i positions) {
    __mmask16 mask = _mm512_cmple_epi32_mask(positions, _mm512_set1_epi32(query));
    if (seen.window) mask &= _mm512_cmpgt_epi32_mask(positions, _mm512_set1_epi32(query - seen.window));
    if (seen.keep) {
        mask &= _mm512_cmpgt_epi32_mask(positions, _mm512_set1_epi32(query - seen.keep)) |
                _mm512_cmplt_epi32_mask(positions, _mm512_set1_epi32(seen.sinks));
    }
    return mask;
}

void look_at_groups(const Visible& seen, Group* groups) {
    for (int g = seen.first / GROUP; g * GROUP < seen.last; g++) {
        __m512i a = positions_of(seen, g * GROUP), b = positions_of(seen, g * GROUP + 16), none = _mm512_set1_epi32(INT32_MAX);
        __mmask16 in_a = _mm512_cmpneq_epi32_mask(a, none), in_b = _mm512_cmpneq_epi32_mask(b, none);
        int newest_a = _mm512_mask_reduce_max_epi32(in_a, a), newest_b = _mm512_mask_reduce_max_epi32(in_b, b);
        groups[g].oldest = _mm512_reduce_min_epi32(_mm512_min_epi32(a, b));
        groups[g].newest = newest_a > newest_b ? newest_a : newest_b;
        groups[g].whole = in_a == 0xffff && in_b == 0xffff;
    }
}

// Who of the queries at positions first .. last sees a group of slots.
Sight sight(const Visible& seen, const Group& group, int first, int last) {
    if (group.oldest > last) return NOBODY;
    if (seen.window && group.newest <= first - seen.window) return NOBODY;
    if (seen.keep && group.newest <= first - seen.keep && group.oldest >= seen.sinks) return NOBODY;
    bool all = group.whole && group.newest <= first && (!seen.window || group.oldest > last - seen.window) &&
               (!seen.keep || group.oldest > last - seen.keep || group.newest < seen.sinks);
    return all ? EVERYBODY : SOMEBODY;
}

// ---------------------------------------------------------------------------------------------------------------------
// Stores of 8 bits.

// 16 pairs of codes times a scale for each side, as pairs of bfloat16.
inline void unpack_pairs(const uint8_t* from, __m512 even_scale, __m512 odd_scale, uint8_t* to) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                                20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)from));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8));
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(odd, odd_scale), _mm512_mul_ps(even, even_scale));
    _mm512_store_si512(to, _mm512_permutexvar_epi16(interleave, both));
}

// The groups of slots of one head that a run may see.
void unpack_groups(const Store& store, int head, const Visible& seen, const Scratch& scratch) {
    const size_t width = store.width;
    const uint8_t *k = store.k + head * store.head_bytes(), *v = store.v + head * store.head_bytes();
    const float *k_scale = store.k_scale + (size_t)head * store.capacity, *v_scale = store.v_scale + (size_t)head * store.capacity;
    for (size_t slot = seen.first / GROUP * GROUP; slot < (size_t)seen.last; slot += 16) {
        const __m512 scale = _mm512_loadu_ps(k_scale + slot);  // of the slots that a pair of channels lies in
        for (size_t c = 0; c < width; c += 2)
            unpack_pairs(k + slot * width + c * 16, scale, scale, scratch.k + (slot * width + c * 16) * 2);
        for (size_t two = slot; two < slot + 16; two += 2)
            for (size_t c = 0; c < width; c += 16)
                unpack_pairs(v + two * width + c * 2, _mm512_set1_ps(v_scale[two]), _mm512_set1_ps(v_scale[two + 1]),
                             scratch.v + (two * width + c * 2) * 2);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles. Numbers 0 to 3 hold results (row tile, column tile), 4 and 5 left sides, 6 and 7 right sides.

inline void multiply_four() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// Eight lines that are needed soon. Spread between products, these keep the unit fed from the second cache.
inline void fetch_lines(const uint8_t* from, size_t apart) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) _mm_prefetch((const char*)from + i * apart, _MM_HINT_T0);
}

// Scores of two tiles of queries. Up to 64 wide, queries stay in their tiles while all keys pass by.
void score_narrow(const Run& run, const int* groups, int n) {
    const int width = run.store.width;
    const bool two = width > 32;
    const uint16_t *q0 = run.scratch.q, *q1 = q0 + ROWS * width;
    float *to0 = run.scratch.scores, *to1 = to0 + 2 * ROUND * 256;
    _tile_loadd(2, q0, 64);
    _tile_loadd(3, q1, 64);
    if (two) _tile_loadd(4, q0 + 512, 64);
    if (two) _tile_loadd(5, q1 + 512, 64);
    for (int g = 0; g < n; g++) {
        const uint8_t* keys = run.k + (size_t)groups[g] * GROUP * width * 2;
        for (int half = 0; half < 2; half++, keys += 32 * width) {
            _tile_loadd(6, keys, 64);
            _tile_zero(0);
            _tile_zero(1);
            const uint8_t* soon = keys + 64 * width;  // two steps later, where the next group lies next to this one
            _tile_dpbf16ps(0, 2, 6);
            fetch_lines(soon, 64);
            _tile_dpbf16ps(1, 3, 6);
            fetch_lines(soon + 512, 64);
            if (two) {
                _tile_loadd(7, keys + 1024, 64);
                _tile_dpbf16ps(0, 4, 7);
                fetch_lines(soon + 1024, 64);
                _tile_dpbf16ps(1, 5, 7);
                fetch_lines(soon + 1536, 64);
            }
            _tile_stored(0, to0 + g * 512 + half * 256, 64);
            _tile_stored(1, to1 + g * 512 + half * 256, 64);
        }
    }
}

void score_wide(const Run& run, const int* groups, int n) {
    const int width = run.store.width;
    const uint16_t *q0 = run.scratch.q, *q1 = q0 + ROWS * width;
    float *to0 = run.scratch.scores, *to1 = to0 + 2 * ROUND * 256;
    for (int g = 0; g < n; g++) {
        const uint8_t* keys = run.k + (size_t)groups[g] * GROUP * width * 2;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < width / 32; c++) {
            _tile_loadd(6, keys + c * 1024, 64);
            _tile_loadd(4, q0 + c * 512, 64);
            _tile_loadd(5, q1 + c * 512, 64);
            _tile_loadd(7, keys + (size_t)width * 32 + c * 1024, 64);
            multiply_four();
        }
        _tile_stored(0, to0 + g * 512, 64);
        _tile_stored(1, to0 + g * 512 + 256, 64);
        _tile_stored(2, to1 + g * 512, 64);
        _tile_stored(3, to1 + g * 512 + 256, 64);
    }
}

void add_values(const Run& run, const int* groups, int n) {
    const int width = run.store.width;
    const float *p0 = run.scratch.scores, *p1 = p0 + 2 * ROUND * 256;
    for (int c = 0; c < width; c += 32) {
        float *sums0 = run.scratch.sums + c, *sums1 = sums0 + ROWS * width;
        _tile_loadd(0, sums0, width * 4);
        _tile_loadd(1, sums0 + 16, width * 4);
        _tile_loadd(2, sums1, width * 4);
        _tile_loadd(3, sums1 + 16, width * 4);
        for (int g = 0; g < n; g++) {
            const uint8_t* values = run.v + (size_t)groups[g] * GROUP * width * 2 + c * 4;
            _tile_loadd(6, values, width * 4);
            _tile_loadd(4, p0 + g * 512, 64);
            _tile_loadd(5, p1 + g * 512, 64);
            _tile_loadd(7, values + 64, width * 4);
            const uint8_t* soon = run.v + (size_t)groups[g + 1 < n ? g + 1 : g] * GROUP * width * 2 + c * 4;
            _tile_dpbf16ps(0, 4, 6);
            fetch_lines(soon, width * 4);
            _tile_dpbf16ps(1, 4, 7);
            fetch_lines(soon + 64, width * 4);
            _tile_dpbf16ps(2, 5, 6);
            fetch_lines(soon + 8 * width * 4, width * 4);
            _tile_dpbf16ps(3, 5, 7);
            fetch_lines(soon + 8 * width * 4 + 64, width * 4);
        }
        _tile_stored(0, sums0, width * 4);
        _tile_stored(1, sums0 + 16, width * 4);
        _tile_stored(2, sums1, width * 4);
        _tile_stored(3, sums1 + 16, width * 4);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax. Scores are in units of log 2, so that a power of two is all it takes.

// Caps all scores of a tile and hides what its queries do not see.
void cap_and_hide(const Run& run, const Tile& tile, float* scores, const int* groups, const bool* partly, int n) {
    const int query = run.seen.query + tile.from;
    for (int g = 0; g < n; g++) {
        bool hide = partly[g] && sight(run.seen, run.scratch.groups[groups[g]], query, query + tile.rows - 1) != EVERYBODY;
        if (!hide && run.softcap <= 0) continue;
        for (int half = 0; half < 2; half++) {
            float* at = scores + (2 * g + half) * 256;
            __m512i positions = positions_of(run.seen, groups[g] * GROUP + half * 16);
            for (int i = 0; i < ROWS; i++) {
                __m512 x = _mm512_load_ps(at + i * 16);
                if (run.softcap > 0) x = capped(x, run.softcap);
                if (hide) x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), sees(run.seen, query + i, positions), x);
                _mm512_store_ps(at + i * 16, x);
            }
        }
    }
}

// What was summed up so far for some rows of a tile, relative to a new base.
void rebase(const Run& run, Tile& tile, int which, uint32_t rows, const float* factors) {
    for (; rows; rows &= rows - 1) {
        const int i = __builtin_ctz(rows);
        const __m512 factor = _mm512_set1_ps(factors[i]);
        float* sums = run.scratch.sums + (which * ROWS + i) * run.store.width;
        for (int c = 0; c < run.store.width; c += 16) _mm512_store_ps(sums + c, _mm512_mul_ps(_mm512_load_ps(sums + c), factor));
        _mm512_store_ps(tile.totals[i], _mm512_mul_ps(_mm512_load_ps(tile.totals[i]), factor));
    }
}

// Scores of n groups to weights for one tile of queries, relative to a base. The base follows the largest score at a distance:
// weights may be as large as 2^SLACK, which costs no precision and saves scaling the sums again and again.
void weigh(const Run& run, Tile& tile, int which, int n) {
    float* scores = run.scratch.scores + which * 2 * ROUND * 256;
    __m512 highest[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) highest[i] = _mm512_set1_ps(-INFINITY);
    for (int g = 0; g < n; g++) {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            highest[i] = _mm512_max_ps(highest[i], _mm512_load_ps(scores + g * 512 + i * 16));
            highest[i] = _mm512_max_ps(highest[i], _mm512_load_ps(scores + g * 512 + 256 + i * 16));
        }
    }
    const __m512 top = highest_of_rows(highest), base = _mm512_load_ps(tile.base);
    const __mmask16 rise = _mm512_cmp_ps_mask(top, _mm512_add_ps(base, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    if (rise) {
        // A base of LOWEST is for rows that have seen nothing: their sums are zeros, and so is the factor.
        alignas(64) float factors[ROWS];
        _mm512_store_ps(factors, power_of_two<true>(_mm512_sub_ps(base, top)));
        _mm512_store_ps(tile.base, _mm512_mask_mov_ps(base, rise, top));
        rebase(run, tile, which, rise & _mm512_cmp_ps_mask(base, _mm512_set1_ps(LOWEST), _CMP_NEQ_OQ), factors);
    }
    for (int i = 0; i < ROWS; i++) {
        const __m512 base = _mm512_set1_ps(tile.base[i]);
        __m512 sum = _mm512_load_ps(tile.totals[i]);
        float* at = scores + i * 16;
        for (int g = 0; g < n; g++, at += 512) {
            __m512 a = power_of_two<false>(_mm512_sub_ps(_mm512_load_ps(at), base));
            __m512 b = power_of_two<false>(_mm512_sub_ps(_mm512_load_ps(at + 256), base));
            sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
            _mm512_store_si512(at, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        _mm512_store_ps(tile.totals[i], sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Two tiles of queries through all slots.

void begin_tile(const Run& run, Tile& tile, int which, int number) {
    const int width = run.store.width, dim = run.store.dim;
    const float scale = run.softcap > 0 ? run.scale : run.scale * 1.44269504f;
    tile.head = number % run.count, tile.from = number / run.count * ROWS;
    tile.rows = run.T - tile.from < ROWS ? run.T - tile.from : ROWS;
    if (tile.rows < 0) tile.rows = 0;
    for (int i = 0; i < ROWS; i++) {
        tile.base[i] = LOWEST;
        _mm512_store_ps(tile.totals[i], _mm512_setzero_ps());
        const float* q = run.q + (size_t)(tile.from + i) * run.ldq + tile.head * dim;
        uint16_t* to = run.scratch.q + which * ROWS * width + i * 32;
        for (int c = 0; c < width; c += 16) {
            int real = i < tile.rows ? dim - c : 0;
            __mmask16 mask = real >= 16 ? 0xffff : real > 0 ? (1 << real) - 1 : 0;
            __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, mask ? q + c : run.q), _mm512_set1_ps(scale));
            _mm256_store_si256((__m256i*)(to + c / 32 * 512 + c % 32), (__m256i)_mm512_cvtneps_pbh(x));
        }
    }
    memset(run.scratch.sums + which * ROWS * width, 0, ROWS * width * sizeof(float));
}

// Whether all results are numbers. They are not where values are not, even those of slots that a query does not see: a weight
// of 0 times what is no number is no number.
bool end_tile(const Run& run, const Tile& tile, int which) {
    const int width = run.store.width, dim = run.store.dim;
    __mmask16 odd = 0;
    for (int i = 0; i < tile.rows; i++) {
        const float* sums = run.scratch.sums + (which * ROWS + i) * width;
        float* out = run.out + (size_t)(tile.from + i) * run.ldo + tile.head * dim;
        const float total = _mm512_reduce_add_ps(_mm512_load_ps(tile.totals[i]));
        const __m512 factor = _mm512_set1_ps(total > 0 ? 1 / total : total);
        for (int c = 0; c < dim; c += 16) {
            __mmask16 mask = dim - c >= 16 ? 0xffff : (1 << (dim - c)) - 1;
            const __m512 x = _mm512_mul_ps(_mm512_load_ps(sums + c), factor);
            _mm512_mask_storeu_ps(out + c, mask, x);
            odd |= _mm512_mask_cmp_ps_mask(mask, _mm512_abs_ps(x), _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        }
    }
    return !odd;
}

bool two_tiles(const Run& run, int number, int tiles) {
    Tile tile[2];
    for (int i = 0; i < 2; i++) begin_tile(run, tile[i], i, number + i);
    const Tile& latest = tile[tiles - 1];
    const int first = run.seen.query + tile[0].from, last = run.seen.query + latest.from + latest.rows - 1;
    const int begin = run.seen.first / GROUP, end = (run.seen.last + GROUP - 1) / GROUP;
    // Rounds begin at multiples of ROUND, so that what a query gets does not depend on the queries that it shares tiles with.
    for (int start = begin / ROUND * ROUND; start < end; start += ROUND) {
        int groups[ROUND], n = 0;
        bool partly[ROUND];
        for (int group = start > begin ? start : begin; group < end && group < start + ROUND; group++) {
            const Sight who = sight(run.seen, run.scratch.groups[group], first, last);
            if (who != NOBODY) groups[n] = group, partly[n++] = who != EVERYBODY;
        }
        if (n == 0) continue;
        written();
        run.store.width <= 64 ? score_narrow(run, groups, n) : score_wide(run, groups, n);
        for (int i = 0; i < tiles; i++) {
            cap_and_hide(run, tile[i], run.scratch.scores + i * 2 * ROUND * 256, groups, partly, n);
            weigh(run, tile[i], i, n);
        }
        written();
        add_values(run, groups, n);
    }
    bool numbers = true;
    for (int i = 0; i < tiles; i++) numbers &= end_tile(run, tile[i], i);
    return numbers;
}

// Query by query, for what tiles cannot do.
void one_by_one(const Run& run, int head) {
    const Scratch& scratch = run.scratch;
    if (!run.seen.positions)
        for (int s = 0; s < run.store.capacity; s++) scratch.slots[s] = s;
    Visible seen = run.seen;
    if (!seen.positions) seen.positions = scratch.slots;
    float most[MAX_GROUP], total[MAX_GROUP];
    for (int t = 0; t < run.T; t++, seen.query++) {
        float* out = run.out + (size_t)t * run.ldo;
        const float* q = run.q + (size_t)t * run.ldq;
        attention_avx512.part(run.store, head, q, run.store.dim, run.count, run.scale, run.softcap, seen, out, run.store.dim,
                              most, total, scratch.rest);
        for (int i = 0; i < run.count; i++)
            for (int c = 0; c < run.store.dim; c++) out[i * run.store.dim + c] /= total[i] != 0 ? total[i] : 1;
    }
}

void many(const Store& store, int head, const float* q, int ldq, int count, int T, float scale, float softcap,
          const Visible& seen, float* out, int ldo, void* memory) {
    const size_t at = head * store.head_bytes();
    const bool packed = store.codec == Codec::INT8;
    const Scratch scratch(store, memory);
    const uint8_t *k = packed ? scratch.k : store.k + at, *v = packed ? scratch.v : store.v + at;
    const Run run = {store, k, v, q, ldq, count, T, scale, softcap, seen, out, ldo, scratch};
    if (packed) unpack_groups(store, head, seen, scratch);
    look_at_groups(seen, run.scratch.groups);
    _tile_loadconfig(&SHAPES);
    const int tiles = (T + ROWS - 1) / ROWS * count;
    bool numbers = true;
    for (int number = 0; number < tiles; number += 2) numbers &= two_tiles(run, number, tiles - number < 2 ? 1 : 2);
    _tile_release();
    if (!numbers) one_by_one(run, head);
}

void put(const Store& store, int head, int slot, const float* k, const float* v) {
    attention_avx512.put(store, head, slot, k, v);
}

size_t scratch_bytes(const Store& store, int slots, int count) { return attention_avx512.scratch_bytes(store, slots, count); }

void part(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
          float* out, int ldo, float* most, float* total, void* scratch) {
    attention_avx512.part(store, head, q, ldq, count, scale, softcap, seen, out, ldo, most, total, scratch);
}

}  // namespace

const AttentionKernels attention_amx = {"amx", put, scratch_bytes, part, many_scratch_bytes, many, attention_avx512.vq};

}  // namespace orchard
