// Which linear kernels run: the best the processor has, or those of a level that a test asks for.
#include <cmath>

#include "kernels.h"

namespace orchard {

#define FOUR(unit) unit, 1.25f * unit, 1.5f * unit, 1.75f * unit
const float BLOCK_SCALES[64] = {
    0.0f, 0x1p-30f, 0x1p-28f, 0x1p-26f, 0x1p-24f, 0x1p-22f, 0x1p-20f, 0x1p-18f,
    FOUR(0x1p-16f), FOUR(0x1p-15f), FOUR(0x1p-14f), FOUR(0x1p-13f), FOUR(0x1p-12f), FOUR(0x1p-11f),
    FOUR(0x1p-10f), FOUR(0x1p-9f), FOUR(0x1p-8f), FOUR(0x1p-7f), FOUR(0x1p-6f), FOUR(0x1p-5f),
    0x1p-4f, 0x1p-2f, 0x1p0f, 0x1p2f, 0x1p4f, 0x1p6f, 0x1p9f, NAN,
};
#undef FOUR

extern const LinearKernels LINEAR_PORTABLE;
#if defined(__x86_64__)
extern const LinearKernels LINEAR_AVX2, LINEAR_AVX512, LINEAR_AMX;
extern const MatrixKernels MATRIX_AMX;
#elif defined(__aarch64__)
extern const LinearKernels LINEAR_NEON;
#endif

const LinearKernels* linear_kernels(int level) {
    const int wanted = level < 0 ? 3 : level;
#if defined(__x86_64__)
    if (wanted >= 3 && cpu().amx_bf16) return &LINEAR_AMX;
    if (wanted >= 2 && cpu().avx512_vnni) return &LINEAR_AVX512;
    if (wanted >= 1 && cpu().avx2) return &LINEAR_AVX2;
#elif defined(__aarch64__)
    if (wanted >= 1 && cpu().neon_dot) return &LINEAR_NEON;
#endif
    (void)wanted;
    return &LINEAR_PORTABLE;
}

const MatrixKernels* matrix_kernels(int level) {
    const int wanted = level < 0 ? 3 : level;
#if defined(__x86_64__)
    if (wanted >= 3 && cpu().amx_bf16) return &MATRIX_AMX;
#endif
    (void)wanted;
    return nullptr;
}

}  // namespace orchard
