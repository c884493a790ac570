// Attention for any processor: vectors are arrays of eight floats that the compiler turns into what the machine has.
#include "attention_vq_many.h"

namespace orchard {
extern const AttentionKernels attention_portable;

namespace {

struct Portable {
    struct F {
        float x[8];
    };
    static constexpr int W = 8;             // floats per vector
    static constexpr int SCORE_SLOTS = 16;  // slots whose scores are summed at once
    static constexpr int HEADS = 2;         // heads per block of registers, at most 4
    static constexpr int COLUMNS = 2;       // vectors of columns per block of registers
    static constexpr int REGISTERS = 4;     // vectors of sums that may be kept at once

#define EACH(expression)                                 \
    F y;                                                 \
    for (int i = 0; i < W; i++) y.x[i] = (expression);   \
    return y
    static F set(float a) { EACH(a); }
    static F load(const float* p) { EACH(p[i]); }
    static void store(float* p, F a) {
        for (int i = 0; i < W; i++) p[i] = a.x[i];
    }
    static F add(F a, F b) { EACH(a.x[i] + b.x[i]); }
    static F sub(F a, F b) { EACH(a.x[i] - b.x[i]); }
    static F mul(F a, F b) { EACH(a.x[i] * b.x[i]); }
    static F div(F a, F b) { EACH(a.x[i] / b.x[i]); }
    static F fma(F a, F b, F c) { EACH(a.x[i] * b.x[i] + c.x[i]); }
    static F max(F a, F b) { EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
    static F abs(F a) { EACH(fabsf(a.x[i])); }
    static F with_sign_of(F a, F sign) { EACH(copysignf(a.x[i], sign.x[i])); }
    static F round(F a) { EACH((a.x[i] + 12582912.0f) - 12582912.0f); }  // 1.5 * 2^23: what is left is whole
    static F where(const int32_t* mask, F a, F b) { EACH(mask[i] ? a.x[i] : b.x[i]); }
    static F zero_below(F a, F x, float bound) { EACH(x.x[i] < bound ? 0 : a.x[i]); }
    static F power_of_two(F n) { EACH(from_bits((uint32_t)((int32_t)n.x[i] + 127) << 23)); }
    // Vectors of the lower and of the upper elements of W pairs.
    static void bf16_pairs(const uint8_t* p, F& even, F& odd) {
        uint32_t pairs[W];
        memcpy(pairs, p, sizeof pairs);
        for (int i = 0; i < W; i++) even.x[i] = from_bits(pairs[i] << 16), odd.x[i] = from_bits(pairs[i] & 0xffff0000u);
    }
    static void int8_pairs(const uint8_t* p, F& even, F& odd) {
        for (int i = 0; i < W; i++) even.x[i] = (int8_t)p[2 * i], odd.x[i] = (int8_t)p[2 * i + 1];
    }
#undef EACH
    // Twice as many whole numbers of 16 bits; made real, the lower half and the upper one.
    struct S {
        int16_t x[16];
    };
    static S load_short(const int16_t* p) {
        S y;
        memcpy(y.x, p, sizeof y.x);
        return y;
    }
    static S add_short(S a, S b) {
        for (int i = 0; i < 2 * W; i++) a.x[i] = (int16_t)(a.x[i] + b.x[i]);
        return a;
    }
    static S sub_short(S a, S b) {
        for (int i = 0; i < 2 * W; i++) a.x[i] = (int16_t)(a.x[i] - b.x[i]);
        return a;
    }
    static void widen(S a, F& low, F& high) {
        for (int i = 0; i < W; i++) low.x[i] = a.x[i], high.x[i] = a.x[W + i];
    }
    // The sums of four vectors.
    static void sum_four(const F* a, float* out) {
        for (int i = 0; i < 4; i++) out[i] = sum(a[i]);
    }
    static float largest(F a) {
        float y = a.x[0];
        for (int i = 1; i < W; i++) y = a.x[i] > y ? a.x[i] : y;
        return y;
    }
    static float sum(F a) {
        float y = 0;
        for (int i = 0; i < W; i++) y += a.x[i];
        return y;
    }

  private:
    static float from_bits(uint32_t bits) {
        float y;
        memcpy(&y, &bits, 4);
        return y;
    }
};

}  // namespace

const AttentionKernels attention_portable = {"portable", attention_put, scratch_bytes, part<Portable>, nullptr, nullptr,
                                              &vq_kernels<Portable>};

}  // namespace orchard
