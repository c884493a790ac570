#include "vector.h"

#include "kernels.h"

namespace orchard {

const VectorKernels* vector_portable();
#if defined(__x86_64__)
const VectorKernels* vector_avx2();
const VectorKernels* vector_avx512();
#elif defined(__aarch64__)
const VectorKernels* vector_neon();
#endif

const VectorKernels* vector_kernels(int level) {
    int most = level < 0 ? 3 : level;
    (void)most;
#if defined(__x86_64__)
    if (most >= 2 && cpu().avx512_vnni) return vector_avx512();
    if (most >= 1 && cpu().avx2) return vector_avx2();
#elif defined(__aarch64__)
    if (most >= 1) return vector_neon();
#endif
    return vector_portable();
}

}  // namespace orchard
