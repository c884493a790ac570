// What the parts of the native engine ask of each other: packed weights, stores, and one table of kernels per instruction set.
//
// Layouts are the same for every instruction set, so a packed file made on one machine runs on another. They are described
// here once; `orchard/ops/kernels/packing.py` writes them and has the plain twin of every kernel's arithmetic.
#pragma once
#include <cstddef>
#include <cstdint>

#include "vq.h"

namespace orchard {

// ---------------------------------------------------------------------------------------------------------------------
// Weights: a matrix [rows, cols], y = W x. Rows go in blocks of 32 (the last one padded with zeros), columns are padded with
// zeros to a multiple of `group` (Q8, Q4, Q2, P4, P2), of 48 (BLOCKS), of 2 (BF16) or not at all (F32, F16); see `padded_cols`.
//
// Q8, Q4, Q2: per block, for every group of columns:
//     32 scales (float16) · 32 minima (float16, only with `minimum`) · codes
//   codes come in chunks of 128 bytes that hold 4 · (8 / bits) columns of all 32 rows. Row r of the block owns the four bytes at
//   (r / 16) * 64 + (r % 16) * 4 + l, l = 0..3; bits [j * bits, (j + 1) * bits) of byte l hold the code of column
//   chunk * 4 * (8 / bits) + j * 4 + l.
//   value = scale * (code - zero) + minimum, where zero is 128 (Q8), 8 (Q4 without minimum), 0 (with minimum), 1.5 (Q2).
// BF16: per block, for every pair of columns: 32 rows × 2 bfloat16 (row r owns bytes 4r .. 4r+3; the lower column first).
// F32: per block, for every column: 32 rows × float32. F16: the same in float16; a last block of up to 16 rows has 16 and no more, for
//   side paths of adapters have few.
// P4, P2 (palettes): per block 64 bytes with two tables of 2^bits float16, of its first and of its last 16 rows (each at the beginning
//   of 32 bytes, zeros behind it), then the codes of all columns as above; value = table[code]. `group` is 32: it cuts activations.
//   Dot products with digits (`linear_q`) read a table as whole numbers of 16 bits: entry / unit, rounded half to even, where unit is
//   2^-14 of the power of two that is not above the largest entry. Entries from 1/16 of the largest on stay exact, and others are off
//   by at most 2^-15 of it, where activations keep 12 bits. Everything else reads tables as they are.
// BLOCKS (of 6 rows × 6 columns that share a scale): `group` is 48. Per block of 32 rows, for every group of columns: 64 bytes of headers,
//   8 for each 6 columns, one for every 6 rows that the block has a part of (the first for row 32 * block / 6 * 6 on); then 6 chunks of
//   128 bytes that hold 8 columns of all 32 rows, four bytes per row, the first column in the lowest 4 bits.
//   value = ± scale * level[digit]: scale is BLOCK_SCALES[header & 63], levels BLOCK_LEVELS[header >> 6 & 1], minus where bit 7 is set.
enum class Kind : int32_t { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3, Q2 = 4, F16 = 5, P4 = 6, P2 = 7, BLOCKS = 8 };

constexpr int BLOCK_SIDE = 6;
constexpr float BLOCK_LEVELS[2][10] = {{-116, -78, -50, -27, -6, 14, 36, 60, 89, 127}, {-86, -56, -34, -15, 0, 16, 33, 53, 80, 127}};
extern const float BLOCK_SCALES[64];  // linear.cpp

struct Weight {
    Kind kind = Kind::F32;
    int32_t group = 1;      // columns that share a scale: a multiple of 32 (Q8, Q4, Q2); 32 (P4, P2)
    int32_t minimum = 0;    // whether minima are stored (Q8, Q4, Q2)
    int32_t rows = 0, cols = 0;
    const uint8_t* data = nullptr;  // 64-byte aligned
    int32_t from = 0, width = 0;  // where in an input of `width` columns this matrix's begin (F32, F16); 0, 0: it reads all of them

    int blocks() const { return (rows + 31) / 32; }
    int bits() const {
        switch (kind) {
            case Kind::Q8: return 8;
            case Kind::Q4: case Kind::P4: return 4;
            case Kind::Q2: case Kind::P2: return 2;
            default: return 0;
        }
    }
    bool quantised() const { return bits() != 0; }  // such a weight is multiplied with digits (`linear_q`)
    bool palette() const { return kind == Kind::P4 || kind == Kind::P2; }
    int padded_cols() const {
        int unit = quantised() || kind == Kind::BLOCKS ? group : kind == Kind::BF16 ? 2 : 1;
        return (cols + unit - 1) / unit * unit;
    }
    size_t group_bytes() const { return 64 + (minimum ? 64 : 0) + (size_t)32 * group * bits() / 8; }
    size_t block_bytes() const {
        if (kind == Kind::BLOCKS) return (size_t)(padded_cols() / group) * (64 + 32 * group / 2);
        if (palette()) return 64 + (size_t)32 * padded_cols() * bits() / 8;
        if (quantised()) return (size_t)(padded_cols() / group) * group_bytes();
        return (size_t)32 * padded_cols() * (kind == Kind::F32 ? 4 : 2);
    }
    // Rows that a block of F16 has room for.
    int lanes(int block) const { return rows - block * 32 <= 16 ? 16 : 32; }
    size_t bytes() const {
        if (kind == Kind::F16) return (size_t)2 * padded_cols() * ((blocks() - 1) * 32 + lanes(blocks() - 1));
        return blocks() * block_bytes();
    }
    int input_cols() const { return width ? width : cols; }
};

// Rows of activations as two 8-bit digits with one scale per group: x ≈ scale * (BASE * q + low), both digits within ±127.
// One digit would be what weights of 4 bits deserve, but costs 3 % of the choices of a small model; two cost nothing that can
// be measured while decoding waits for memory. 16 times a code of 4 bits is still a byte, which lets matrix tiles add both digits
// up at once. `sum` is scale * (BASE * q + low, added up over the group).
constexpr int BASE = 16;

struct QuantRows {
    int8_t* digits;  // [T][ldd], 64-byte aligned rows: of 32 columns at a time q and then low; zero past the real columns
    float* scale;    // [T][ldg]
    float* sum;      // [T][ldg]
    int ldd, ldg;

    QuantRows from(int row) const {
        return {digits + (size_t)row * ldd, scale + (size_t)row * ldg, sum + (size_t)row * ldg, ldd, ldg};
    }
};

constexpr int digit_at(int column) { return column / 32 * 64 + column % 32; }  // q in a row; low is 32 bytes on

constexpr int SMALL = 8;  // at most this many rows go through `linear_f` in one call, and at least as many through `linear_q`

struct LinearKernels {
    const char* name;
    int most;  // rows in one call of `linear_q`
    // One row: x[0..cols) in groups, the last group padded with zeros up to `padded`. scale = max|x| / (127 * BASE), 0 for a group
    // of zeros; with a = x / scale, q = round(a / BASE) and low = round(a) - BASE * q, both rounded half to even.
    void (*quantise)(const float* x, int cols, int padded, int group, int8_t* digits, float* scale, float* sum);
    // y[t * ldy + r] (+)= (W x_t)[r] for the rows r of blocks [first, last), t in 0..T-1, T in 1..most. Only real rows are
    // written. What a row gets does not depend on T. `add`: added to what is there. y points at row 0 of the whole output.
    void (*linear_q)(const Weight& w, int first, int last, const QuantRows& x, int T, float* y, int ldy, bool add);
    // The same for F32, BF16, F16 and BLOCKS weights, T in 1..SMALL, with float32 activations (row t at x + t * ldx) and float32 sums.
    void (*linear_f)(const Weight& w, int first, int last, const float* x, int ldx, int T, float* y, int ldy, bool add);
    // One row of a weight as float32 (embeddings): out[0..cols).
    void (*row)(const Weight& w, int r, float* out);
};

// Many rows at once by matrix units, in bfloat16 with float32 sums. Null where there are none: then `linear_*` does it in pieces.
struct MatrixKernels {
    const char* name;
    // Called by every thread before its first `multiply` of a run and after its last (tile configuration).
    void (*begin)();
    void (*end)();
    // Activations in the order the kernel likes: rows [first, last) of x (float32) → packed bfloat16. `packed` is for all T rows,
    // of packed_bytes(T, cols); rows up to the next multiple of 32 are zeroed by whoever packs the last real row. first is
    // a multiple of 32.
    size_t (*packed_bytes)(int T, int cols);
    void (*pack)(const float* x, int ldx, int T, int cols, int first, int last, void* packed);
    // Panels of blocks [first, last) of a weight, dequantised to bfloat16 into `panel` of panel_bytes(w, last - first).
    size_t (*panel_bytes)(const Weight& w, int blocks);
    void (*panel)(const Weight& w, int first, int last, void* panel);
    // y[t * ldy + (r - 32 * first)] (+)= (W x_t)[r] for the real rows r of the panel's blocks and rows t in [row0, row1) of x, row0 a
    // multiple of 32. y points at the panel's first row, for t = 0.
    void (*multiply)(const Weight& w, const void* panel, int first, int last, const void* packed, int T, int row0, int row1,
                     float* y, int ldy, bool add);
};

// ---------------------------------------------------------------------------------------------------------------------
// Stores: one layer's keys and values of one sequence. `width` is `dim` padded to a multiple of 32 with zeros; `capacity` is a
// multiple of 32. Slots that were never written hold zeros. Head h begins at k + h * head_bytes(), v + h * head_bytes().
//   BF16: k [capacity / 16][width / 2][16][2], v [capacity / 2][width][2]    (bfloat16)
//   INT8: the same shapes in int8, with one scale per head and slot in k_scale, v_scale [heads][capacity]; value = scale * code,
//         scale = max|x| / 127
//   F32:  k [capacity / 16][width][16], v [capacity][width]                  (float32)
//   VQ:   rows of codes, see vq.h
enum class Codec : int32_t { F32 = 0, BF16 = 1, INT8 = 2, VQ = 3 };

struct Store {
    Codec codec = Codec::BF16;
    int32_t heads = 0, dim = 0, width = 0, capacity = 0;
    uint8_t* k = nullptr;  // 64-byte aligned
    uint8_t* v = nullptr;
    float* k_scale = nullptr;
    float* v_scale = nullptr;
    const VqBooks* books = nullptr;  // VQ
    float* exact = nullptr;          // VQ

    // Of a slot of one head.
    size_t k_slot_bytes() const { return books ? books->key_bytes() : capacity ? head_bytes() / capacity : 0; }
    size_t v_slot_bytes() const { return books ? books->value_bytes() : capacity ? head_bytes() / capacity : 0; }
    size_t head_bytes() const { return (size_t)capacity * width * (codec == Codec::F32 ? 4 : codec == Codec::BF16 ? 2 : 1); }
};

// Which slots a query at position `query` sees, among slots [first, last): those that hold a position p with p <= query,
// (window == 0 or p > query - window), and (keep == 0 or p > query - keep or p < sinks).
struct Visible {
    const int32_t* positions;  // per slot, -1 where empty; null: slot s holds position s, and [first, last) is all visible for
                               // `query` (the caller has cut it by causality and window)
    int32_t first, last;
    int32_t query, window, keep, sinks;
};

constexpr int MAX_GROUP = 16;  // query heads per key/value head in one call of `part`

struct AttentionKernels {
    const char* name;
    // Write one slot of head h: k, v are float32 [dim].
    void (*put)(const Store& store, int head, int slot, const float* k, const float* v);
    // Part of the attention of `count` query heads (q: count × dim float32, rows ldq apart, rotated and not scaled) that share key
    // head `head`, one query each, over the visible slots: score = q·k * scale, through softcap * tanh(score / softcap) when
    // softcap > 0; most[i] = the largest score (-inf where nothing is visible), total[i] = sum of exp(score - most),
    // out[i * ldo + c] = sum of exp(score - most) * v[c] (zeros where nothing is visible). `scratch` has scratch_bytes(...).
    size_t (*scratch_bytes)(const Store& store, int slots, int count);
    void (*part)(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
                 float* out, int ldo, float* most, float* total, void* scratch);
    // Whole attention of a run of T queries at positions query0 .. query0 + T - 1 of one sequence for the `count` query heads of key head
    // `head`; q and out: row t, head i at q + t * ldq + i * dim (out likewise with ldo). `seen.query` is query0, seen.first/last bound the
    // slots of the whole run (positions null: slot = position; causality and window are applied here). The result is
    // normalised. Null where there are no matrix units: then `part` does it row by row.
    size_t (*many_scratch_bytes)(const Store& store, int count);
    void (*many)(const Store& store, int head, const float* q, int ldq, int count, int T, float scale, float softcap, const Visible& seen,
                 float* out, int ldo, void* scratch);
    const VqKernels* vq;  // for stores of codes, which `part` and `many` do not read
};

// ---------------------------------------------------------------------------------------------------------------------
// Which kernels this machine runs. `level`: 0 portable, 1 AVX2 or NEON, 2 AVX-512, 3 with matrix units; -1 the best there is.
// Each asks the processor by itself and answers null (or the next lower level) for what it cannot run.
const LinearKernels* linear_kernels(int level);
const MatrixKernels* matrix_kernels(int level);
const AttentionKernels* attention_kernels(int level);

struct Cpu {
    bool avx2, avx512_vnni, avx512_bf16, amx_bf16, neon_dot;
};
const Cpu& cpu();  // avx2: with FMA and F16C; avx512_vnni: with F, BW, VL, DQ; amx_bf16: also granted by the system

}  // namespace orchard
