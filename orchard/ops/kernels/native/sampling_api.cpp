// The sampling head as Python calls it: one row of scores in, one token id out. See sampling.cpp.
#include <cstdint>

namespace orchard {
int64_t sample_greedy(const float* scores, int64_t count);
int64_t sample_choose(const float* scores, int64_t count, double temperature, int64_t top_k, double top_p, double distance,
                      double uniform);
}  // namespace orchard

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t orchard_sample_greedy(const float* scores, int64_t count) { return orchard::sample_greedy(scores, count); }

EXPORTED int64_t orchard_sample_choose(const float* scores, int64_t count, double temperature, int64_t top_k, double top_p,
                                       double distance, double uniform) {
    return orchard::sample_choose(scores, count, temperature, top_k, top_p, distance, uniform);
}
