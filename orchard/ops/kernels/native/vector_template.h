// Plain loops that compilers turn into vector instructions of whatever set the including file is compiled for. Sums run over
// LANES separate totals, because a compiler may not reorder a single one.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace orchard {
namespace {

constexpr int LANES = 16;

// Relative error below 1e-6 for -87 < x < 88; bounded outside.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float turns = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    float whole = turns - 12582912.0f;
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    int32_t power = ((int32_t)whole + 127) << 23;
    float factor;
    std::memcpy(&factor, &power, 4);
    return sum * factor;
}

inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
inline float error_function(float x) {
    float size = x < 0 ? -x : x;
    float t = 1.0f / (1.0f + 0.3275911f * size);
    float sum = ((((1.061405429f * t - 1.453152027f) * t) + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    float value = 1.0f - sum * t * exponential(-size * size);
    return x < 0 ? -value : value;
}

void norm(const float* x, const float* weight, float eps, int width, float* out) {
    float totals[LANES] = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int lane = 0; lane < LANES; lane++) totals[lane] += x[i + lane] * x[i + lane];
    float total = 0;
    for (; i < width; i++) total += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) total += totals[lane];
    float factor = 1.0f / std::sqrt(total / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

void gate(const float* gate, const float* up, int count, Activation activation, float* out) {
    switch (activation) {
        case Activation::Silu:
            for (int i = 0; i < count; i++) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
            break;
        case Activation::Gelu:
            for (int i = 0; i < count; i++) out[i] = 0.5f * gate[i] * (1.0f + error_function(gate[i] * 0.70710678f)) * up[i];
            break;
        case Activation::GeluTanh:
            for (int i = 0; i < count; i++) {
                float x = gate[i], inner = 0.79788456f * (x + 0.044715f * x * x * x);
                out[i] = 0.5f * x * (1.0f + hyperbolic_tangent(inner)) * up[i];
            }
            break;
        case Activation::Relu:
            for (int i = 0; i < count; i++) out[i] = (gate[i] > 0 ? gate[i] : 0) * up[i];
            break;
    }
}

void rotate(float* x, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cosines[i] - high * sines[i];
        x[i + half] = high * cosines[i] + low * sines[i];
    }
}

void add(float* to, const float* x, int count) {
    for (int i = 0; i < count; i++) to[i] += x[i];
}

void add_scaled(float* to, const float* x, float factor, int count) {
    for (int i = 0; i < count; i++) to[i] += x[i] * factor;
}

void scale(float* x, float factor, int count) {
    for (int i = 0; i < count; i++) x[i] *= factor;
}

void scale_each(float* x, const float* factors, int count) {
    for (int i = 0; i < count; i++) x[i] *= factors[i];
}

void clip(float* x, float bound, int count) {
    for (int i = 0; i < count; i++) x[i] = x[i] > bound ? bound : x[i] < -bound ? -bound : x[i];
}

void softcap(float* x, float cap, int count) {
    for (int i = 0; i < count; i++) x[i] = hyperbolic_tangent(x[i] / cap) * cap;
}

void softmax(float* x, int count) {
    float most = x[0];
    for (int i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    float total = 0;
    for (int i = 0; i < count; i++) {
        x[i] = exponential(x[i] - most);
        total += x[i];
    }
    for (int i = 0; i < count; i++) x[i] /= total;
}

const VectorKernels TABLE = {norm, gate, rotate, add, add_scaled, scale, scale_each, clip, softcap, softmax};

}  // namespace
}  // namespace orchard
