// Linear kernels for 64-bit ARM with the dot product instructions (ARMv8.2 and every Apple processor).
#include <arm_neon.h>

#include "linear_template.h"

namespace orchard {
namespace {

struct Neon {
    static constexpr int LANES = 4, MOST = 8;
    static constexpr bool QUADS = true;
    using Floats = float32x4_t;
    using Ints = int32x4_t;
    using Bytes = int8x16_t;
    static constexpr int strips(int T) { return T == 1 ? 8 : T == 2 ? 4 : T <= 4 ? 2 : 1; }

    static Floats zero() { return vdupq_n_f32(0.0f); }
    static Ints zeros() { return vdupq_n_s32(0); }
    static Floats everywhere(float value) { return vdupq_n_f32(value); }
    static Floats load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Floats a) { vst1q_f32(to, a); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats convert(Ints a) { return vcvtq_f32_s32(a); }
    static Ints round(Floats a) { return vcvtnq_s32_f32(a); }
    static Floats halves(const uint8_t* from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
    static Floats lower(const uint8_t* from) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(vld1q_u8(from)), 16));
    }
    static Floats upper(const uint8_t* from) {
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(vld1q_u8(from)), vdupq_n_u32(0xffff0000u)));
    }
    static void store_bytes(int8_t* to, Ints a) {
        const int16x4_t words = vmovn_s32(a);
        const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
        std::memcpy(to, &four, 4);
    }
    static Ints less(Ints a, Ints b, int factor) { return vmlsq_n_s32(a, b, factor); }
    static int32_t total(Ints a) { return vaddvq_s32(a); }

    static Bytes bytes(const uint8_t* from) { return vreinterpretq_s8_u8(vld1q_u8(from)); }
    static Bytes four_bytes(const int8_t* from) {
        int32_t word;
        std::memcpy(&word, from, 4);
        return vreinterpretq_s8_s32(vdupq_n_s32(word));
    }
    template <int BITS>
    static Bytes part(Bytes a, int j) {
        const uint8x16_t codes = vreinterpretq_u8_s8(a);
        if (BITS == 8) return vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80)));
        const uint8x16_t low = vshlq_u8(codes, vdupq_n_s8((int8_t)(-j * BITS)));
        return vreinterpretq_s8_u8(vandq_u8(low, vdupq_n_u8((uint8_t)((1 << BITS) - 1))));
    }
    template <int BITS>
    static Ints dot(Ints sum, Bytes codes, Bytes x) {
        return vdotq_s32(sum, codes, x);
    }

    static Bytes sixteen(const int8_t* from) { return vld1q_s8(from); }
    static Ints dots(Ints sum, Bytes a, Bytes b, Bytes c, Bytes d, Bytes x) {
        sum = vdotq_laneq_s32(sum, a, x, 0);
        sum = vdotq_laneq_s32(sum, b, x, 1);
        sum = vdotq_laneq_s32(sum, c, x, 2);
        return vdotq_laneq_s32(sum, d, x, 3);
    }

    struct Table {  // low and high bytes of the entries
        uint8x16_t low, high;
    };
    struct Wide {  // of each of the four rows, in four pieces
        int32x4_t row[4];
    };
    static Table table(const int16_t* entries) {
        uint8_t low[16], high[16];
        for (int i = 0; i < 16; ++i) low[i] = (uint8_t)entries[i], high[i] = (uint8_t)((uint16_t)entries[i] >> 8);
        return {vld1q_u8(low), vld1q_u8(high)};
    }
    static Wide wide_zeros() { return {{zeros(), zeros(), zeros(), zeros()}}; }
    static Ints narrowed(const Wide& sum) {
        return vpaddq_s32(vpaddq_s32(sum.row[0], sum.row[1]), vpaddq_s32(sum.row[2], sum.row[3]));
    }
    static void look_up(Wide& sum, const Table& table, Bytes codes, const int16_t* x) {
        const int16x4_t numbers = vld1_s16(x);
        const uint8x16_t code = vreinterpretq_u8_s8(codes);
        const uint8x16_t low = vqtbl1q_u8(table.low, code), high = vqtbl1q_u8(table.high, code);
        const int16x8_t first = vreinterpretq_s16_u8(vzip1q_u8(low, high)), last = vreinterpretq_s16_u8(vzip2q_u8(low, high));
        sum.row[0] = vmlal_s16(sum.row[0], vget_low_s16(first), numbers);
        sum.row[1] = vmlal_s16(sum.row[1], vget_high_s16(first), numbers);
        sum.row[2] = vmlal_s16(sum.row[2], vget_low_s16(last), numbers);
        sum.row[3] = vmlal_s16(sum.row[3], vget_high_s16(last), numbers);
    }
};

}  // namespace

extern const LinearKernels LINEAR_NEON = {"neon-dot", SMALL, quantise<Neon>, linear_q<Neon>, linear_f<Neon>, plain_row};

}  // namespace orchard
