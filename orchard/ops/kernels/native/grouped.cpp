#include "grouped.h"

#include <atomic>
#include <thread>
#include <vector>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace orchard {

const GroupedKernels* grouped_portable();
#if defined(__x86_64__)
const GroupedKernels* grouped_avx2();
const GroupedKernels* grouped_avx512();
#elif defined(__aarch64__)
const GroupedKernels* grouped_neon();
#endif

const GroupedKernels* grouped_kernels(int level) {
    int most = level < 0 ? 3 : level;
    (void)most;
#if defined(__x86_64__)
    if (most >= 2 && cpu().avx512_vnni) return grouped_avx512();
    if (most >= 1 && cpu().avx2) return grouped_avx2();
#elif defined(__aarch64__)
    if (most >= 1) return grouped_neon();
#endif
    return grouped_portable();
}

namespace {

// Rows of weights that are one piece of work, and tokens that are multiplied with them before the next ones: both stay in a cache.
constexpr int ROWS = 32, TOKENS = 48;

struct Piece {
    int64_t token;
    int tokens, group, first;
};

}  // namespace
}  // namespace orchard

// y [tokens][out] = x [tokens][cols] · weights[group]ᵀ, where the first counts[0] rows of x are group 0's, and so on. `half`: weights
// are bfloat16. The work is shared among at most `threads` threads, which changes no bit of it.
EXPORT void orchard_grouped(int level, const float* x, const void* weights, int half, const int64_t* counts, int groups, int out,
                            int cols, int threads, float* y) {
    using namespace orchard;
    const GroupedKernels* const kernels = grouped_kernels(level);
    const int64_t bytes = half ? 2 : 4;
    std::vector<Piece> pieces;
    int64_t start = 0;
    for (int group = 0; group < groups; start += counts[group++])
        for (int64_t token = 0; token < counts[group]; token += TOKENS)
            for (int first = 0; first < out; first += ROWS)
                pieces.push_back({start + token, (int)(counts[group] - token < TOKENS ? counts[group] - token : TOKENS), group, first});
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
            const Piece& piece = pieces[at];
            const char* w = (const char*)weights + bytes * piece.group * out * cols;
            kernels->multiply(x + piece.token * cols, cols, piece.tokens, w, half != 0, cols, piece.first,
                              piece.first + ROWS < out ? piece.first + ROWS : out, y + piece.token * out, out);
        }
    };
    // A thread costs some ten microseconds: only where each has more than that to do.
    const int64_t helpers = start * out * cols / 1000000;
    std::vector<std::thread> team;
    for (int i = 1; i < threads && i <= helpers; i++) team.emplace_back(work);
    work();
    for (std::thread& helper : team) helper.join();
}
