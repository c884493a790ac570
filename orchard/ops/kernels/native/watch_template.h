// The shares of slots in the softmax of queries, in the compiler's own vectors. The including file says how many numbers a vector has
// (WIDTH) and how many queries meet a block of slots at once in registers (TILE).
//
// Keys of BLOCK slots are turned into float32 once for all queries of a call; whole rows of scores are kept, because a share is only
// known when all of them are.
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "watch.h"

namespace orchard {
namespace {

constexpr int BLOCK = 16;  // slots that lie side by side
constexpr int VECTORS = BLOCK / WIDTH;

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Floats add_product(Floats sum, Floats a, float b) {
#if defined(__aarch64__)
    return (Floats)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)a, b);
#elif WIDTH == 16 && defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum);
#elif WIDTH == 8 && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)sum);
#else
    return sum + a * b;
#endif
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// e^x for x up to 0, to about 1e-6 of its value; nothing below -87.
inline Floats exponential(Floats x) {
    const Floats least = Floats{} - 87.0f, clamped = x > least ? x : least;
    const Floats turns = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const Floats whole = turns - 12582912.0f;
    const Floats rest = clamped - whole * 0.693145752f - whole * 1.42860677e-6f;
    Floats sum = Floats{} + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    Ints bits;
    std::memcpy(&bits, &turns, sizeof bits);
    bits = (bits + 127) << 23;  // the whole number stands in the lowest bits
    Floats factor;
    std::memcpy(&factor, &bits, sizeof factor);
    return x > least ? sum * factor : Floats{};
}

// cap * tanh(x / cap)
inline Floats capped(Floats x, float cap) {
    const Floats size = x > 0.0f ? x : -x, e = exponential(size * (-2 / cap)), y = (cap - e * cap) / (1.0f + e);
    return x > 0.0f ? y : -y;
}

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }
inline int rounded(int slots) { return (slots + BLOCK - 1) / BLOCK * BLOCK; }

// A block of keys as float32 [width][BLOCK]; those of 8 bits without their scales.
const float* block_of(const Store& store, int head, int slot, float* room) {
    const uint8_t* keys = store.k + head * store.head_bytes();
    const int width = store.width;
    if (store.codec == Codec::F32) return (const float*)keys + (size_t)slot * width;
    if (store.codec == Codec::BF16) {
        const uint8_t* from = keys + (size_t)slot * width * 2;
        for (int pair = 0; pair < width / 2; pair++) {
            uint32_t both[BLOCK], even[BLOCK], odd[BLOCK];
            std::memcpy(both, from + pair * BLOCK * 4, sizeof both);
            for (int s = 0; s < BLOCK; s++) even[s] = both[s] << 16, odd[s] = both[s] & 0xffff0000u;
            std::memcpy(room + pair * 2 * BLOCK, even, sizeof even);
            std::memcpy(room + (pair * 2 + 1) * BLOCK, odd, sizeof odd);
        }
        return room;
    }
    const uint8_t* from = keys + (size_t)slot * width;
    for (int pair = 0; pair < width / 2; pair++) {
        int16_t both[BLOCK];
        std::memcpy(both, from + pair * BLOCK * 2, sizeof both);
        float *even = room + pair * 2 * BLOCK, *odd = even + BLOCK;
        for (int s = 0; s < BLOCK; s++) even[s] = (float)(int8_t)both[s], odd[s] = (float)(both[s] >> 8);
    }
    return room;
}

template <int T>
void tile(const float* keys, int width, const float* q, float* scores, size_t next) {
    Floats sum[T][VECTORS] = {};
    for (int c = 0; c < width; c++) {
        Floats key[VECTORS];
        for (int i = 0; i < VECTORS; i++) key[i] = load(keys + c * BLOCK + i * WIDTH);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < VECTORS; i++) sum[t][i] = add_product(sum[t][i], key[i], q[t * width + c]);
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < VECTORS; i++) store(scores + t * next + i * WIDTH, sum[t][i]);
}

template <int T>
void rest(const float* keys, int width, const float* q, int queries, float* scores, size_t next) {
    if (queries == T) tile<T>(keys, width, q, scores, next);
    else if constexpr (T > 1) rest<T - 1>(keys, width, q, queries, scores, next);
}

// One query's scores, of which [first, last) are seen, become shares of slots [first, shown).
void weigh(float* scores, int first, int last, int shown, float softcap, float factor, float* best) {
    const int from = first / BLOCK * BLOCK, upto = rounded(last);
    for (int s = from; softcap > 0 && s < upto; s += WIDTH) store(scores + s, capped(load(scores + s), softcap));
    for (int s = from; s < first; s++) scores[s] = -INFINITY;
    for (int s = last; s < upto; s++) scores[s] = -INFINITY;
    Floats most[VECTORS], total[VECTORS] = {};
    for (int i = 0; i < VECTORS; i++) most[i] = load(scores + from + i * WIDTH);
    for (int s = from; s < upto; s += BLOCK)
        for (int i = 0; i < VECTORS; i++) {
            const Floats here = load(scores + s + i * WIDTH);
            most[i] = here > most[i] ? here : most[i];
        }
    float top = -INFINITY, sum = 0;
    for (int i = 0; i < BLOCK; i++) top = most[i / WIDTH][i % WIDTH] > top ? most[i / WIDTH][i % WIDTH] : top;
    for (int s = from; s < upto; s += BLOCK)
        for (int i = 0; i < VECTORS; i++) {
            const Floats here = exponential(load(scores + s + i * WIDTH) - top);
            store(scores + s + i * WIDTH, here);
            total[i] += here;
        }
    for (int i = 0; i < BLOCK; i++) sum += total[i / WIDTH][i % WIDTH];
    const float share = (factor != 0 ? factor : 1) / sum;
    const int end = smaller(last, shown);
    if (factor != 0) {
        for (int s = first; s < end; s++) best[s] += scores[s] * share;
        return;
    }
    for (int s = first; s < end; s++) {
        const float here = scores[s] * share;
        best[s] = here > best[s] ? here : best[s];
    }
}

size_t floats(const Store& store, int queries, int last) {
    return (size_t)store.width * BLOCK + (size_t)queries * rounded(last);
}

void look(const Store& store, int head, const float* q, int queries, int group, int first, int window, float softcap, int shown,
          float factor, float* best, float* scratch) {
    const int width = store.width, last = first + (queries - 1) / group + 1, next = rounded(last);
    const int begin = window ? larger(first - window + 1, 0) : 0;
    float* scores = scratch + (size_t)width * BLOCK;
    for (int slot = begin / BLOCK * BLOCK; slot < last; slot += BLOCK) {
        const float* keys = block_of(store, head, slot, scratch);
        int i = 0;
        for (; i + TILE <= queries; i += TILE) tile<TILE>(keys, width, q + (size_t)i * width, scores + (size_t)i * next + slot, next);
        rest<TILE - 1>(keys, width, q + (size_t)i * width, queries - i, scores + (size_t)i * next + slot, next);
        if (store.codec != Codec::INT8) continue;
        const float* scale = store.k_scale + (size_t)head * store.capacity + slot;
        for (i = 0; i < queries; i++)
            for (int s = 0; s < BLOCK; s++) scores[(size_t)i * next + slot + s] *= scale[s];
    }
    for (int i = 0; i < queries; i++) {
        const int place = first + i / group;
        weigh(scores + (size_t)i * next, window ? larger(place - window + 1, 0) : 0, place + 1, shown, softcap, factor, best);
    }
}

const WatchKernels TABLE = {look, floats};

}  // namespace
}  // namespace orchard
