// Which attention kernels this machine runs, and writing to a store, which is the same for all of them.
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace orchard {

extern const AttentionKernels attention_portable;
#if defined(__x86_64__)
extern const AttentionKernels attention_avx2, attention_avx512, attention_amx;
#elif defined(__aarch64__)
extern const AttentionKernels attention_neon;
#endif

// The best kernels up to `level`; -1: the best there are.
const AttentionKernels* attention_kernels(int level) {
    if (level < 0) level = 3;
#if defined(__x86_64__)
    if (level >= 3 && cpu().avx512_vnni && cpu().avx512_bf16 && cpu().amx_bf16) return &attention_amx;
    if (level >= 2 && cpu().avx512_vnni) return &attention_avx512;
    if (level >= 1 && cpu().avx2) return &attention_avx2;
#elif defined(__aarch64__)
    if (level >= 1 && cpu().neon_dot) return &attention_neon;
#endif
    return &attention_portable;
}

namespace {

constexpr int BLOCK = 16;  // slots that lie side by side in a block of keys

struct ToBf16 {
    uint16_t operator()(float x) const {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;                // to nearest, half to even
        return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);  // a NaN stays one
    }
};

struct ToInt8 {
    float factor;

    // Codes for x[0..n), and the scale that takes them back. Numbers that are not finite give a scale that is none, so that they
    // are not lost in silence.
    ToInt8(const float* x, int n, float* scale) {
        float most = 0;
        bool odd = false;
        for (int c = 0; c < n; c++) {
            float size = fabsf(x[c]);
            most = size > most ? size : most;
            odd |= !(size <= 3.4028235e38f);
        }
        *scale = odd ? NAN : most / 127;
        factor = odd || most < 1e-36f ? 0 : 127 / most;  // 127 / most would overflow below
        if (factor == 0 && !odd) *scale = 0;
    }
    int8_t operator()(float x) const { return (int8_t)(x == x ? lrintf(x * factor) : 0); }  // half to even
};

template <class Element, class Convert>
void put_pairs(const Store& s, int head, int slot, const float* k, const float* v, Convert to_k, Convert to_v) {
    Element* key = (Element*)(s.k + head * s.head_bytes()) + (size_t)(slot / BLOCK) * s.width * BLOCK + slot % BLOCK * 2;
    Element* value = (Element*)(s.v + head * s.head_bytes()) + (size_t)(slot / 2) * s.width * 2 + slot % 2;
    for (int c = 0; c + 1 < s.dim; c += 2) {
        Element pair[2] = {to_k(k[c]), to_k(k[c + 1])};
        memcpy(key + c * BLOCK, pair, sizeof pair);
    }
    if (s.dim % 2) key[(s.dim - 1) * BLOCK] = to_k(k[s.dim - 1]);
    for (int c = 0; c < s.dim; c++) value[c * 2] = to_v(v[c]);
}

}  // namespace

void attention_put(const Store& s, int head, int slot, const float* k, const float* v) {
    if (s.codec == Codec::VQ) {
        vq_put(s, head, slot, k, v);
    } else if (s.codec == Codec::BF16) {
        put_pairs<uint16_t>(s, head, slot, k, v, ToBf16{}, ToBf16{});
    } else if (s.codec == Codec::INT8) {
        size_t at = (size_t)head * s.capacity + slot;
        put_pairs<int8_t>(s, head, slot, k, v, ToInt8(k, s.dim, s.k_scale + at), ToInt8(v, s.dim, s.v_scale + at));
    } else {
        float* key = (float*)(s.k + head * s.head_bytes()) + (size_t)(slot / BLOCK) * s.width * BLOCK + slot % BLOCK;
        float* value = (float*)(s.v + head * s.head_bytes()) + (size_t)slot * s.width;
        for (int c = 0; c < s.dim; c++) key[c * BLOCK] = k[c];
        memcpy(value, v, s.dim * sizeof(float));
    }
}

}  // namespace orchard
