// How fast this machine reads memory: the limit that decoding runs into. Measured, because data sheets do not know how many
// neighbours share the memory controllers.
//
// Every thread reads a slice of its own in several streams at once, each a page or more from the next, with wide loads; what is
// read is summed so that no compiler may leave it out. One function per register width: the widest that the processor has is used.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace orchard {

namespace {

constexpr int STREAMS = 4;         // a core keeps about this many runs of cache lines in flight by itself
constexpr size_t LINE = 64;        // bytes of a cache line
constexpr size_t AHEAD = 16 * LINE;  // how far before its use a line is asked for

// Reads `bytes` (a multiple of STREAMS * LINE) and answers a sum over them.
using Reader = uint64_t (*)(const uint8_t* data, size_t bytes);

uint64_t read_plain(const uint8_t* data, size_t bytes) {
    const size_t stream = bytes / STREAMS;
    uint64_t sums[STREAMS] = {};
    for (size_t at = 0; at < stream; at += LINE)
        for (int s = 0; s < STREAMS; ++s) {
            const uint8_t* line = data + s * stream + at;
            __builtin_prefetch(line + AHEAD);
            uint64_t words[LINE / 8];
            std::memcpy(words, line, LINE);
            for (uint64_t word : words) sums[s] += word;
        }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* data, size_t bytes) {
    const size_t stream = bytes / STREAMS;
    __m256i sums[STREAMS][2];
    for (auto& pair : sums) pair[0] = pair[1] = _mm256_setzero_si256();
    for (size_t at = 0; at < stream; at += LINE)
        for (int s = 0; s < STREAMS; ++s) {
            const uint8_t* line = data + s * stream + at;
            __builtin_prefetch(line + AHEAD);
            sums[s][0] = _mm256_add_epi64(sums[s][0], _mm256_load_si256((const __m256i*)line));
            sums[s][1] = _mm256_add_epi64(sums[s][1], _mm256_load_si256((const __m256i*)(line + 32)));
        }
    __m256i all = _mm256_setzero_si256();
    for (auto& pair : sums) all = _mm256_add_epi64(all, _mm256_add_epi64(pair[0], pair[1]));
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256((__m256i*)lanes, all);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* data, size_t bytes) {
    const size_t stream = bytes / STREAMS;
    __m512i sums[STREAMS];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    for (size_t at = 0; at < stream; at += LINE)
        for (int s = 0; s < STREAMS; ++s) {
            const uint8_t* line = data + s * stream + at;
            __builtin_prefetch(line + AHEAD);
            sums[s] = _mm512_add_epi64(sums[s], _mm512_load_si512(line));
        }
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
}
#endif

Reader best_reader() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
    return read_plain;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

// Bytes per second of `threads` threads that read `bytes` at `data` (64-byte aligned) together, the best of `repeats` rounds.
// `sink` takes the sums.
double read_bandwidth(const uint8_t* data, size_t bytes, int threads, int repeats, uint64_t* sink) {
    const Reader reader = best_reader();
    const size_t slice = bytes / threads / (STREAMS * LINE) * (STREAMS * LINE);
    std::vector<uint64_t> sums(threads);
    double best = 0;
    for (int round = 0; round < repeats; ++round) {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false};
        std::vector<std::thread> others;
        const auto work = [&](int t) {
            ready.fetch_add(1);
            while (!go.load()) std::this_thread::yield();
            sums[t] += reader(data + t * slice, slice);
        };
        for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
        while (ready.load() < threads - 1) std::this_thread::yield();
        const auto start = std::chrono::steady_clock::now();
        go.store(true);
        work(0);
        for (std::thread& other : others) other.join();
        const double rate = slice * threads / seconds_since(start);
        if (rate > best) best = rate;
    }
    for (uint64_t sum : sums) *sink += sum;
    return best;
}

}  // namespace orchard
