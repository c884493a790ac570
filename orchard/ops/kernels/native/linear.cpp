// Which linear kernels run: the best the processor has, or those of a level that a test asks for.
#include "kernels.h"

namespace orchard {

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
