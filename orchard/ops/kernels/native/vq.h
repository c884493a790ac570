// Stores whose slots are sums of codewords (CommVQ; orchard/ops/vq.py says what the codes mean and has the plain twin).
//
//   key   = key_offset   + prescale * sum over rounds of (c[A] + i c[B])    dim / 2 complex numbers: channels p and p + dim / 2
//   value = value_offset + prescale * sum over rounds of e[code]            an even number of rounds
//
// A slot of a head is a row of bytes: the indices (index j begins at bit j * bits, lowest bit first; keys: A, B of the first round,
// then of the next), and the prescale as float16. Rows of keys are in `Store::k`, of values in `Store::v`: [heads][capacity][row].
// Keys are kept unrotated. The first `exact` tokens of a sequence are kept as they come (float32, unrotated) in `Store::exact`:
// keys [heads][exact][dim], then values.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace orchard {

struct Store;
struct Visible;

constexpr int VQ_BLOCK = 32;    // slots that are decoded at once; their keys are rotated relative to the first one
constexpr int VQ_PART = 2048;   // slots of one part of attention: what is summed by code has to pay for the sum over all codes
constexpr int VQ_MOST_DIM = 512;
constexpr int VQ_MOST_ROUNDS = 128;

// One layer's codebooks, as they are given and as the kernels want them. Channels of a head come in two halves (real and imaginary
// parts) of `lanes`: dim / 2 padded with zeros to a multiple of 32.
struct VqBooks {
    int heads = 0, dim = 0, lanes = 0, columns = 0;  // columns: dim padded to a multiple of 32
    int key_rounds = 0, key_words = 0, key_bits = 0, value_rounds = 0, value_words = 0, value_bits = 0;
    int exact = 0;
    const float* keys = nullptr;          // [heads][rounds][words][dim]
    const float* values = nullptr;        // the same for values
    const float* key_offset = nullptr;    // [heads][dim]
    const float* value_offset = nullptr;  // [heads][dim]
    const float* key_weight = nullptr;    // [heads][dim / 2]
    const float* value_metric = nullptr;  // [heads][dim][dim]

    std::vector<float> key_costs, value_costs;    // of a pair of words: [heads][rounds][words][words]; values: of two rounds each
    std::vector<float> value_probes;              // codewords of values times the metric
    std::vector<int16_t> step_memory;
    int16_t* steps = nullptr;                     // 64-byte aligned, codewords of keys in whole units: [heads][rounds][words][2][lanes]
    std::vector<float> unit, inverse, offset;     // [heads][2][lanes]: the units, one over them, offsets of keys in units
    std::vector<float> padded_values;             // where dim is no multiple of 32
    const float* value_rows = nullptr;            // [heads][rounds][words][columns]
    std::vector<float> turns;                     // cosines and sines of 0 .. VQ_BLOCK positions: [..][2][lanes]; empty: no rotation
    std::vector<float> frequencies;               // [lanes], zeros past the real ones
    float gain = 1;

    int key_bytes() const { return (2 * key_rounds * key_bits + 7) / 8 + 2; }  // of a row
    int value_bytes() const { return (value_rounds * value_bits + 7) / 8 + 2; }
    size_t exact_floats() const { return (size_t)2 * heads * exact * dim; }

    // After the fields above `key_costs` are there.
    void prepare();
    void rotate_by(const float* rotary, int half, float rotary_gain);
};

// Encodes and writes one slot of a head: k (unrotated) and v are float32 [dim].
void vq_put(const Store& store, int head, int slot, const float* k, const float* v);

struct VqKernels {
    // As `part` of AttentionKernels, over slots that hold the positions of their number.
    size_t (*scratch_bytes)(const Store& store, int slots, int count);
    void (*part)(const Store& store, int head, const float* q, int ldq, int count, float scale, float softcap, const Visible& seen,
                 float* out, int ldo, float* most, float* total, void* scratch);
    // As `many`: each block of slots is decoded once for all queries.
    size_t (*many_scratch_bytes)(const Store& store, int count, int T);
    void (*many)(const Store& store, int head, const float* q, int ldq, int count, int T, float scale, float softcap,
                 const Visible& seen, float* out, int ldo, void* scratch);
};

// A positive float16, and any that is no number.
inline float vq_prescale(const uint8_t* at) {
    uint32_t bits = (uint32_t)at[0] | (uint32_t)at[1] << 8;
    bits = bits >= 0x7c00 ? 0x7fc00000u : bits << 13;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y * 0x1p112f;
}

// `count` indices of BITS bits each, one byte for each, eight at a time: up to 7 indices more are written, and up to 8 bytes past the
// packed ones are read (a cache has room behind its last row). Halves of a word are moved apart, then their halves, then theirs.
template <int BITS>
inline void vq_unpack(const uint8_t* from, int count, uint8_t* to) {
    constexpr uint64_t FOUR = (1ull << 4 * BITS) - 1, TWO = ((1ull << 2 * BITS) - 1) * 0x100000001ull, ONE = ((1ull << BITS) - 1) * 0x1000100010001ull;
    for (int at = 0; at < count; at += 8, from += BITS) {
        uint64_t x = 0;
        __builtin_memcpy(&x, from, BITS);
        x = (x & FOUR) | (x >> 4 * BITS & FOUR) << 32;
        x = (x & TWO) | (x >> 2 * BITS & TWO) << 16;
        x = (x & ONE) | (x >> BITS & ONE) << 8;
        __builtin_memcpy(to + at, &x, 8);
    }
}

// The same for `rows` rows that lie `bytes` apart; what they give lies `stride` apart.
template <int BITS>
inline void vq_unpack_rows(const uint8_t* from, int bytes, int rows, int count, uint8_t* to, int stride) {
    for (int row = 0; row < rows; row++) vq_unpack<BITS>(from + (size_t)row * bytes, count, to + (size_t)row * stride);
}

inline void vq_indices(const uint8_t* from, int bytes, int rows, int bits, int count, uint8_t* to, int stride) {
    switch (bits) {
        case 1: return vq_unpack_rows<1>(from, bytes, rows, count, to, stride);
        case 2: return vq_unpack_rows<2>(from, bytes, rows, count, to, stride);
        case 3: return vq_unpack_rows<3>(from, bytes, rows, count, to, stride);
        case 4: return vq_unpack_rows<4>(from, bytes, rows, count, to, stride);
        case 5: return vq_unpack_rows<5>(from, bytes, rows, count, to, stride);
        case 6: return vq_unpack_rows<6>(from, bytes, rows, count, to, stride);
        case 7: return vq_unpack_rows<7>(from, bytes, rows, count, to, stride);
        default: return vq_unpack_rows<8>(from, bytes, rows, count, to, stride);
    }
}

}  // namespace orchard
