#include "watch.h"

#include "kernels.h"

namespace orchard {

const WatchKernels* watch_portable();
#if defined(__x86_64__)
const WatchKernels* watch_avx2();
const WatchKernels* watch_avx512();
#elif defined(__aarch64__)
const WatchKernels* watch_neon();
#endif

const WatchKernels* watch_kernels(int level) {
    int most = level < 0 ? 3 : level;
    (void)most;
#if defined(__x86_64__)
    if (most >= 2 && cpu().avx512_vnni) return watch_avx512();
    if (most >= 1 && cpu().avx2) return watch_avx2();
#elif defined(__aarch64__)
    if (most >= 1) return watch_neon();
#endif
    return watch_portable();
}

}  // namespace orchard
