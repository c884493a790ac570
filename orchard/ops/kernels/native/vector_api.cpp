// The small operations by themselves, for tests. `level`: see kernels.h.
#include "vector.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace orchard;

EXPORT void orchard_vector_norm(int level, const float* x, const float* weight, float eps, int width, float* out) {
    vector_kernels(level)->norm(x, weight, eps, width, out);
}

EXPORT void orchard_vector_gate(int level, const float* gate, const float* up, int count, int activation, float* out) {
    vector_kernels(level)->gate(gate, up, count, (Activation)activation, out);
}

EXPORT void orchard_vector_rotate(int level, float* x, const float* cosines, const float* sines, int half) {
    vector_kernels(level)->rotate(x, cosines, sines, half);
}

EXPORT void orchard_vector_add_scaled(int level, float* to, const float* x, float factor, int count) {
    vector_kernels(level)->add_scaled(to, x, factor, count);
}

EXPORT void orchard_vector_scale_each(int level, float* x, const float* factors, int count) {
    vector_kernels(level)->scale_each(x, factors, count);
}

EXPORT void orchard_vector_clip(int level, float* x, float bound, int count) { vector_kernels(level)->clip(x, bound, count); }

EXPORT void orchard_vector_softcap(int level, float* x, float cap, int count) { vector_kernels(level)->softcap(x, cap, count); }

EXPORT void orchard_vector_softmax(int level, float* x, int count) { vector_kernels(level)->softmax(x, count); }
