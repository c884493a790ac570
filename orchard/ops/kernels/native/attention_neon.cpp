// Attention for Arm processors with NEON (64-bit).
#include <arm_neon.h>

#include "attention_vq_many.h"

namespace orchard {
extern const AttentionKernels attention_neon;

namespace {

struct Neon {
    typedef float32x4_t F;
    static constexpr int W = 4, SCORE_SLOTS = 16, HEADS = 4, COLUMNS = 4, REGISTERS = 16;

    static F set(float a) { return vdupq_n_f32(a); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F a) { vst1q_f32(p, a); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F max(F a, F b) { return vmaxnmq_f32(a, b); }
    static F abs(F a) { return vabsq_f32(a); }
    static F with_sign_of(F a, F sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, a); }
    static F round(F a) { return vrndnq_f32(a); }
    static F where(const int32_t* mask, F a, F b) { return vbslq_f32(vreinterpretq_u32_s32(vld1q_s32(mask)), a, b); }
    static F zero_below(F a, F x, float bound) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, set(bound))));
    }
    static F power_of_two(F n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)); }
    static void bf16_pairs(const uint8_t* p, F& even, F& odd) {
        uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(p));
        even = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
        odd = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    }
    static void int8_pairs(const uint8_t* p, F& even, F& odd) {
        int16x8_t all = vmovl_s8(vld1_s8((const int8_t*)p));
        int32x4_t pairs = vreinterpretq_s32_s16(all);  // two neighbours in each
        even = vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(pairs, 16), 16));
        odd = vcvtq_f32_s32(vshrq_n_s32(pairs, 16));
    }
    typedef int16x8_t S;
    static S load_short(const int16_t* p) { return vld1q_s16(p); }
    static S add_short(S a, S b) { return vaddq_s16(a, b); }
    static S sub_short(S a, S b) { return vsubq_s16(a, b); }
    static void widen(S a, F& low, F& high) {
        low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), high = vcvtq_f32_s32(vmovl_high_s16(a));
    }
    static void sum_four(const F* a, float* out) { vst1q_f32(out, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3]))); }
    static float largest(F a) { return vmaxnmvq_f32(a); }
    static float sum(F a) { return vaddvq_f32(a); }
};

}  // namespace

const AttentionKernels attention_neon = {"neon", attention_put, scratch_bytes, part<Neon>, nullptr, nullptr, &vq_kernels<Neon>};

}  // namespace orchard
