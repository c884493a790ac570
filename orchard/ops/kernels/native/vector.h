// Small operations on rows of float32: one table per instruction set, all from the plain loops of vector_template.h.
#pragma once

namespace orchard {

enum class Activation : int { Silu = 0, Gelu = 1, GeluTanh = 2, Relu = 3 };

struct VectorKernels {
    // out = x / rms(x) * weight, over `width` values; x and out may be the same.
    void (*norm)(const float* x, const float* weight, float eps, int width, float* out);
    // out = act(gate) * up; out may be one of them.
    void (*gate)(const float* gate, const float* up, int count, Activation activation, float* out);
    // Turns channel i with channel i + half, for half pairs, by given cosines and sines; the other channels pass. In place.
    void (*rotate)(float* x, const float* cosines, const float* sines, int half);
    void (*add)(float* to, const float* x, int count);
    void (*add_scaled)(float* to, const float* x, float factor, int count);
    void (*scale)(float* x, float factor, int count);
    void (*scale_each)(float* x, const float* factors, int count);
    void (*clip)(float* x, float bound, int count);
    void (*softcap)(float* x, float cap, int count);
    void (*softmax)(float* x, int count);
};

const VectorKernels* vector_kernels(int level);  // as in kernels.h

}  // namespace orchard
