// The sampling head as Python calls it: one row of scores in, one token id out. See sampling.cpp.
#include <cstdint>

namespace orchard {
int64_t sample_greedy(const float* scores, int64_t count);
int64_t sample_choose(const float* scores, int64_t count, double temperature, int64_t top_k, double top_p, double distance,
                      double uniform);
void sample_mask(const float* scores, const uint8_t* bits, int64_t count, float* out);
}  // namespace orchard

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t orchard_sample_greedy(const float* scores, int64_t count) { return orchard::sample_greedy(scores, count); }

EXPORTED int64_t orchard_sample_choose(const float* scores, int64_t count, double temperature, int64_t top_k, double top_p,
                                       double distance, double uniform) {
    return orchard::sample_choose(scores, count, temperature, top_k, top_p, distance, uniform);
}

EXPORTED void orchard_sample_mask(const float* scores, const uint8_t* bits, int64_t count, float* out) {
    orchard::sample_mask(scores, bits, count, out);
}
