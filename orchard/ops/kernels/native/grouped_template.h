// Dot products of rows in the compiler's own vectors, WIDTH numbers wide: the including file says how wide, and how many weight
// rows (TALL) meet four tokens at once in registers. Every product of a row with a row is one running sum, whatever the tile it
// is computed in.
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "grouped.h"

namespace orchard {
namespace {

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Floats load(const uint16_t* from) {  // bfloat16: the upper half of a float32
#if defined(__aarch64__)
    return (Floats)vshll_n_u16(vld1_u16(from), 16);
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats value;
    std::memcpy(&value, &words, sizeof value);
    return value;
#endif
}

inline float one(const float* from) { return *from; }

inline float one(const uint16_t* from) {
    const uint32_t word = (uint32_t)*from << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// Neighbours first, whatever the instructions: the order is part of what a row becomes.
inline float total(Floats sum) {
#if defined(__aarch64__)
    return vaddvq_f32((float32x4_t)sum);
#else
    float lanes[WIDTH];
    std::memcpy(lanes, &sum, sizeof lanes);
    for (int left = WIDTH / 2; left; left /= 2)
        for (int i = 0; i < left; i++) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    return lanes[0];
#endif
}

template <int T, int R, bool AHEAD, class W>
void tile(const float* x, int64_t ldx, const W* w, int cols, float* y, int64_t ldy) {
    Floats sum[T][R] = {};
    int i = 0;
    for (; i + WIDTH <= cols; i += WIDTH) {
        Floats weights[R];
        for (int r = 0; r < R; r++) weights[r] = load(w + (int64_t)r * cols + i);
        if (AHEAD && i * sizeof(W) % 64 == 0)  // the next rows are on their way while these are at work
            for (int r = 0; r < R; r++) __builtin_prefetch(w + (int64_t)(R + r) * cols + i);
        for (int t = 0; t < T; t++) {
            const Floats token = load(x + t * ldx + i);
            for (int r = 0; r < R; r++) sum[t][r] += weights[r] * token;
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) {
            float value = total(sum[t][r]);
            for (int j = i; j < cols; j++) value += one(w + (int64_t)r * cols + j) * x[t * ldx + j];
            y[t * ldy + r] = value;
        }
}

template <int R, class W>
void across(const float* x, int64_t ldx, int tokens, const W* w, int cols, float* y, int64_t ldy) {
    int t = 0;
    if (tokens >= 4) tile<4, R, true>(x, ldx, w, cols, y, ldy), t = 4;
    for (; t + 4 <= tokens; t += 4) tile<4, R, false>(x + t * ldx, ldx, w, cols, y + t * ldy, ldy);
    if (tokens - t == 3) tile<3, R, true>(x + t * ldx, ldx, w, cols, y + t * ldy, ldy);
    if (tokens - t == 2) tile<2, R, true>(x + t * ldx, ldx, w, cols, y + t * ldy, ldy);
    if (tokens - t == 1) tile<1, R, true>(x + t * ldx, ldx, w, cols, y + t * ldy, ldy);
}

template <class W>
void multiply_as(const float* x, int64_t ldx, int tokens, const W* w, int cols, int first, int last, float* y, int64_t ldy) {
    int r = first;
    if (tokens == 1)  // one token keeps too few sums running: more rows at once
        for (; r + 2 * TALL <= last; r += 2 * TALL) tile<1, 2 * TALL, true>(x, ldx, w + (int64_t)r * cols, cols, y + r, ldy);
    for (; r + TALL <= last; r += TALL) across<TALL>(x, ldx, tokens, w + (int64_t)r * cols, cols, y + r, ldy);
    for (; r < last; r++) across<1>(x, ldx, tokens, w + (int64_t)r * cols, cols, y + r, ldy);
}

void multiply(const float* x, int64_t ldx, int tokens, const void* w, bool half, int cols, int first, int last, float* y,
              int64_t ldy) {
    if (half)
        multiply_as(x, ldx, tokens, (const uint16_t*)w, cols, first, last, y, ldy);
    else
        multiply_as(x, ldx, tokens, (const float*)w, cols, first, last, y, ldy);
}

const GroupedKernels TABLE = {multiply};

}  // namespace
}  // namespace orchard
