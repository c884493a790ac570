// What Python calls to measure the machine's limits (orchard/bench/limits.py).
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace orchard {
double read_bandwidth(const uint8_t* data, size_t bytes, int threads, int repeats, uint64_t* sink);
}

// Bytes per second that `threads` threads read from a set of `bytes`, the best of `repeats`; negative where there is no memory for it
// or the numbers make no sense.
extern "C" __attribute__((visibility("default"))) double orchard_read_bandwidth(uint64_t bytes, int threads, int repeats) {
    constexpr uint64_t ALIGNMENT = 4096;
    if (threads < 1 || threads > 1024 || repeats < 1 || bytes < (uint64_t)threads * ALIGNMENT) return -1;
    bytes = bytes / ALIGNMENT * ALIGNMENT;
    void* data = nullptr;
    if (posix_memalign(&data, ALIGNMENT, bytes) != 0) return -1;
    std::memset(data, 1, bytes);  // pages that were never written are all the same one, and would be read from the cache
    volatile uint64_t sink = 0;
    uint64_t sum = 0;
    const double rate = orchard::read_bandwidth((const uint8_t*)data, bytes, threads, repeats, &sum);
    sink = sum;
    (void)sink;
    std::free(data);
    return rate;
}
