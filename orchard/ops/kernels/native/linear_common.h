// Small things that every linear kernel needs. All in an anonymous namespace: each file is compiled for its own instruction set,
// and the linker must not swap one file's copy for another's.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace orchard {
namespace {

// How far ahead of the arithmetic weights are asked for. Some pages of four kilobytes: the processor's own prefetcher stops at
// the end of each page, and a file mapped into memory has small ones.
constexpr int AHEAD = 6144;
constexpr int FAR = 14336, NEAR = 1024;
constexpr size_t LARGE = 2u << 20;  // bytes of a matrix from which it is asked for that far ahead

// The code that stands for `minimum`, or for zero where there are no minima.
inline float zero_of(Kind kind, bool minimum) {
    return minimum ? 0.0f : kind == Kind::Q8 ? 128.0f : kind == Kind::Q4 ? 8.0f : 1.5f;
}

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) return float_of_bits(sign | 0x70000000u | rest | 0x0f800000u);  // infinities and not-a-number
    // As if the exponent had float's bias, then put right by an exact multiplication, which also serves subnormal numbers.
    return float_of_bits(sign | bits_of_float(float_of_bits(rest) * 0x1p112f));
}

inline float float_of_bfloat(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

inline uint16_t half_at(const uint8_t* bytes, int index) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * index, 2);
    return half;
}

// Activations of one group: scale and 1 / scale from the bits of the largest magnitude. Not-a-number and infinity have the
// largest bits of all: such a group gets a scale of not-a-number, so that the fault shows in the result.
struct GroupScale {
    float scale, inverse;
};

inline GroupScale scale_of(uint32_t most_bits) {
    const float most = float_of_bits(most_bits);
    if (!(most <= FLT_MAX)) return {NAN, 0.0f};
    if (most < 1e-33f) return {0.0f, 0.0f};  // the inverse would be infinite
    return {most / (127.0f * BASE), 127.0f * BASE / most};
}

// A table of `count` float16 as whole numbers of 16 bits, and their unit (kernels.h). What is not finite makes the unit so too.
inline float whole_entries(const uint8_t* halves, int count, int16_t* entries) {
    uint32_t most = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t bits = bits_of_float(float_of_half(half_at(halves, i))) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    const bool usable = most && most < 0x7f800000u;
    const float unit = usable ? float_of_bits((most & 0x7f800000u) - (14u << 23)) : most ? NAN : 0.0f;
    const float inverse = usable ? 1.0f / unit : 0.0f;  // powers of two: exact
    for (int i = 0; i < count; ++i) entries[i] = usable ? (int16_t)lrintf(float_of_half(half_at(halves, i)) * inverse) : (int16_t)0;
    return unit;
}

// Where a block's header for one of its rows and the columns from c on lies in a group of columns.
inline uint8_t block_header(const uint8_t* group, int row, int c) {
    return group[c / BLOCK_SIDE * 8 + row / BLOCK_SIDE - row / 32 * 32 / BLOCK_SIDE];
}

inline float block_value(uint8_t header, int digit) {
    const float value = BLOCK_SCALES[header & 63] * BLOCK_LEVELS[header >> 6 & 1][digit < 9 ? digit : 9];
    return header & 0x80 ? -value : value;
}

// One row as float32. scale * (code - zero) is exact (11 + 8 bits), so compilers may fuse it with the addition or not.
inline void plain_row(const Weight& w, int r, float* out) {
    const uint8_t* block = w.data + (size_t)(r / 32) * w.block_bytes();
    const int lane = r % 32, bits = w.bits();
    if (w.kind == Kind::F32) {
        for (int c = 0; c < w.cols; ++c) std::memcpy(out + c, block + (size_t)c * 128 + lane * 4, 4);
        return;
    }
    if (w.kind == Kind::BF16) {
        for (int c = 0; c < w.cols; ++c) out[c] = float_of_bfloat(half_at(block + (size_t)(c / 2) * 128 + lane * 4, c % 2));
        return;
    }
    if (w.kind == Kind::F16) {
        for (int c = 0; c < w.cols; ++c) out[c] = float_of_half(half_at(block + (size_t)c * 2 * w.lanes(r / 32), lane));
        return;
    }
    if (w.kind == Kind::BLOCKS) {
        for (int from = 0; from < w.cols; from += w.group, block += 64 + 16 * w.group)
            for (int c = 0; c < w.group && from + c < w.cols; ++c) {
                uint32_t word;
                std::memcpy(&word, block + 64 + c / 8 * 128 + lane * 4, 4);
                out[from + c] = block_value(block_header(block, r, c), (int)(word >> (c % 8 * 4) & 15));
            }
        return;
    }
    const int parts = 8 / bits, mask = (1 << bits) - 1;
    if (w.palette()) {
        const uint8_t *table = block + lane / 16 * 32, *codes = block + 64 + lane * 4;
        for (int c = 0; c < w.cols; ++c) {
            const int chunk = c / (4 * parts), within = c % (4 * parts);
            out[c] = float_of_half(half_at(table, codes[(size_t)chunk * 128 + within % 4] >> (within / 4 * bits) & mask));
        }
        return;
    }
    const float zero = zero_of(w.kind, w.minimum);
    for (int from = 0; from < w.cols; from += w.group, block += w.group_bytes()) {
        const float scale = float_of_half(half_at(block, lane));
        const float minimum = w.minimum ? float_of_half(half_at(block + 64, lane)) : 0.0f;
        const uint8_t* codes = block + (w.minimum ? 128 : 64) + lane * 4;
        const int count = w.cols - from < w.group ? w.cols - from : w.group;
        for (int c = 0; c < count; ++c) {
            const int chunk = c / (4 * parts), within = c % (4 * parts);
            const int code = codes[(size_t)chunk * 128 + within % 4] >> (within / 4 * bits) & mask;
            out[from + c] = scale * ((float)code - zero) + minimum;
        }
    }
}

}  // namespace
}  // namespace orchard
