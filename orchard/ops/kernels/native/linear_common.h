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
    const int parts = 8 / bits, mask = (1 << bits) - 1;
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
