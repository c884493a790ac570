// Codebooks as the kernels want them, and the greedy encoder: the same steps as `encode_keys` and `encode_values` of orchard/ops/vq.py.
#include "vq.h"

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace orchard {
namespace {

int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

constexpr int LANES = 8;  // sums of a dot product that are kept apart, so that the compiler may use vectors

float dot(const float* a, const float* b, int n) {
    float sums[LANES] = {}, total = 0;
    int c = 0;
    for (; c + LANES <= n; c += LANES)
        for (int i = 0; i < LANES; i++) sums[i] += a[c + i] * b[c + i];
    for (; c < n; c++) total += a[c] * b[c];
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

// A positive number as float16, to nearest, half to even; what is no number stays none.
void put_prescale(uint8_t* at, float x) {
    uint32_t bits;
    if (!(x <= 3.4e38f)) {
        bits = 0x7e00;
    } else {
        x = (x < 65504.0f ? x : 65504.0f) * 0x1p-112f;
        std::memcpy(&bits, &x, 4);
        bits = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    }
    at[0] = bits & 255, at[1] = bits >> 8;
}

void pack(const uint8_t* indices, int bits, int count, uint8_t* to) {
    uint32_t held = 0;
    int have = 0;
    for (int i = 0; i < count; i++) {
        held |= (uint32_t)indices[i] << have;
        for (have += bits; have >= 8; have -= 8, held >>= 8) *to++ = held & 255;
    }
    if (have) *to = held & 255;
}

// x - offset at length 1 in `left`; answers its length.
float normalised(const float* x, const float* offset, int dim, float* centred, float* left) {
    for (int c = 0; c < dim; c++) centred[c] = x[c] - offset[c];
    const float norm = std::sqrt(dot(centred, centred, dim)), below = norm > 1e-12f ? norm : norm == norm ? 1e-12f : norm;
    for (int c = 0; c < dim; c++) left[c] = centred[c] / below;
    return norm;
}

// The factor that brings what was made nearest to x, where `weighted` is what was made, in the metric.
float fitted(const float* weighted, const float* made, const float* x, int dim, float norm) {
    const float square = dot(weighted, made, dim), best = dot(weighted, x, dim) / (square > 1e-12f ? square : 1e-12f);
    return best > 0 ? best : norm;
}

// The pair with the largest with_a[A] + with_b[B] - cost[A][B].
void best_pair(const float* with_a, const float* with_b, const float* costs, int n, uint8_t* pair) {
    float most = -INFINITY;
    pair[0] = pair[1] = 0;
    for (int a = 0; a < n; a++) {
        const float* cost = costs + (size_t)a * n;
        float here = -INFINITY;
        for (int b = 0; b < n; b++) here = with_b[b] - cost[b] > here ? with_b[b] - cost[b] : here;
        if (!(with_a[a] + here > most)) continue;
        int b = 0;
        while (b < n - 1 && with_b[b] - cost[b] != here) b++;
        most = with_a[a] + here, pair[0] = a, pair[1] = b;
    }
}

void put_key(const VqBooks& b, int head, const float* k, uint8_t* row) {
    const int dim = b.dim, half = dim / 2, n = b.key_words;
    float x[VQ_MOST_DIM] = {}, left[VQ_MOST_DIM], unit[VQ_MOST_DIM], weighted[VQ_MOST_DIM], turned[VQ_MOST_DIM];
    float with_a[256], with_b[256];
    uint8_t indices[2 * VQ_MOST_ROUNDS];
    const float norm = normalised(k, b.key_offset + (size_t)head * dim, dim, x, left), *weight = b.key_weight + (size_t)head * half;
    std::memcpy(unit, left, sizeof(float) * dim);
    for (int r = 0; r < b.key_rounds; r++) {
        const size_t round = (size_t)head * b.key_rounds + r;
        const float* words = b.keys + round * n * dim;
        for (int p = 0; p < half; p++) {
            weighted[p] = left[p] * weight[p], weighted[half + p] = left[half + p] * weight[p];
            turned[p] = weighted[half + p], turned[half + p] = -weighted[p];  // times -i: c gives with it what i c gives with `weighted`
        }
        for (int j = 0; j < n; j++) with_a[j] = dot(words + (size_t)j * dim, weighted, dim), with_b[j] = dot(words + (size_t)j * dim, turned, dim);
        best_pair(with_a, with_b, b.key_costs.data() + round * n * n, n, indices + 2 * r);
        const float *first = words + (size_t)indices[2 * r] * dim, *second = words + (size_t)indices[2 * r + 1] * dim;
        for (int p = 0; p < half; p++) {
            left[p] -= first[p] - second[half + p];
            left[half + p] -= first[half + p] + second[p];
        }
    }
    for (int c = 0; c < dim; c++) unit[c] -= left[c], weighted[c] = unit[c] * weight[c % half];
    pack(indices, b.key_bits, 2 * b.key_rounds, row);
    put_prescale(row + b.key_bytes() - 2, fitted(weighted, unit, x, dim, norm));
}

// Two rounds at a time, as the two indices of a key's round.
void put_value(const VqBooks& b, int head, const float* v, uint8_t* row) {
    const int dim = b.dim, m = b.value_words;
    float x[VQ_MOST_DIM] = {}, left[VQ_MOST_DIM], unit[VQ_MOST_DIM], weighted[VQ_MOST_DIM];
    float with_a[256], with_b[256];
    uint8_t indices[VQ_MOST_ROUNDS];
    const float norm = normalised(v, b.value_offset + (size_t)head * dim, dim, x, left), *metric = b.value_metric + (size_t)head * dim * dim;
    std::memcpy(unit, left, sizeof(float) * dim);
    for (int r = 0; r < b.value_rounds; r += 2) {
        const size_t round = (size_t)head * b.value_rounds + r;
        const float *words = b.values + round * m * dim, *probes = b.value_probes.data() + round * m * dim;
        for (int j = 0; j < m; j++) with_a[j] = dot(probes + (size_t)j * dim, left, dim), with_b[j] = dot(probes + (size_t)(m + j) * dim, left, dim);
        best_pair(with_a, with_b, b.value_costs.data() + round / 2 * m * m, m, indices + r);
        const float *first = words + (size_t)indices[r] * dim, *second = words + (size_t)(m + indices[r + 1]) * dim;
        for (int c = 0; c < dim; c++) left[c] -= first[c] + second[c];
    }
    for (int c = 0; c < dim; c++) unit[c] -= left[c];
    for (int c = 0; c < dim; c++) weighted[c] = dot(metric + (size_t)c * dim, unit, dim);
    pack(indices, b.value_bits, b.value_rounds, row);
    put_prescale(row + b.value_bytes() - 2, fitted(weighted, unit, x, dim, norm));
}

}  // namespace

void vq_put(const Store& s, int head, int slot, const float* k, const float* v) {
    const VqBooks& b = *s.books;
    if (slot < b.exact) {
        std::memcpy(s.exact + ((size_t)head * b.exact + slot) * b.dim, k, sizeof(float) * b.dim);
        std::memcpy(s.exact + ((size_t)(b.heads + head) * b.exact + slot) * b.dim, v, sizeof(float) * b.dim);
        return;
    }
    put_key(b, head, k, s.k + ((size_t)head * s.capacity + slot) * b.key_bytes());
    put_value(b, head, v, s.v + ((size_t)head * s.capacity + slot) * b.value_bytes());
}

// The unit of a pair of channels is the smallest power of two (orchard/ops/vq_grid.py) for which no sum of one codeword, and one
// times i, per round leaves 16 bits.
static void whole_numbers(VqBooks& b, int head) {
    const int n = b.key_words, half = b.dim / 2;
    const float* words = b.keys + (size_t)head * b.key_rounds * n * b.dim;
    int16_t* steps = b.steps + (size_t)head * b.key_rounds * n * 2 * b.lanes;
    for (int p = 0; p < half; p++) {
        double most = 0;
        for (int r = 0; r < b.key_rounds; r++) {
            float x = 0, y = 0;
            for (int j = 0; j < n; j++) {
                const float* word = words + ((size_t)r * n + j) * b.dim;
                x = std::fmax(x, std::fabs(word[p])), y = std::fmax(y, std::fabs(word[half + p]));
            }
            most += (double)x + y;
        }
        int exponent = 0;
        if (most > 0) std::frexp(most / (32767 - 2 * b.key_rounds), &exponent);
        const float unit = (float)std::ldexp(1.0, exponent);
        for (int r = 0; r < b.key_rounds * n; r++)
            for (int side = 0; side < 2; side++)
                steps[((size_t)r * 2 + side) * b.lanes + p] = (int16_t)std::lrint(words[(size_t)r * b.dim + side * half + p] / unit);
        for (int side = 0; side < 2; side++) {
            const size_t at = ((size_t)head * 2 + side) * b.lanes + p;
            b.unit[at] = unit, b.inverse[at] = 1 / unit;
            b.offset[at] = b.key_offset[(size_t)head * b.dim + side * half + p] / unit;
        }
    }
}

void VqBooks::prepare() {
    const int half = dim / 2, n = key_words, m = value_words;
    lanes = round_up(half, 32), columns = round_up(dim, 32);
    for (key_bits = 0; 1 << key_bits < n;) key_bits++;
    for (value_bits = 0; 1 << value_bits < m;) value_bits++;
    step_memory.assign((size_t)heads * key_rounds * n * 2 * lanes + 32, 0);
    steps = reinterpret_cast<int16_t*>((reinterpret_cast<uintptr_t>(step_memory.data()) + 63) / 64 * 64);
    for (std::vector<float>* table : {&unit, &inverse, &offset}) table->assign((size_t)heads * 2 * lanes, 0);
    for (int head = 0; head < heads; head++) whole_numbers(*this, head);

    key_costs.resize((size_t)heads * key_rounds * n * n);
    std::vector<float> weighted(dim);
    for (int at = 0; at < heads * key_rounds; at++) {
        const float *words = keys + (size_t)at * n * dim, *weight = key_weight + (size_t)(at / key_rounds) * half;
        std::vector<float> norms(n);
        for (int j = 0; j < n; j++) {
            for (int c = 0; c < dim; c++) weighted[c] = words[(size_t)j * dim + c] * weight[c % half];
            norms[j] = dot(weighted.data(), words + (size_t)j * dim, dim) / 2;
        }
        for (int i = 0; i < n; i++) {
            const float* a = words + (size_t)i * dim;
            for (int p = 0; p < half; p++) weighted[p] = a[half + p] * weight[p], weighted[half + p] = -a[p] * weight[p];
            for (int j = 0; j < n; j++)
                key_costs[((size_t)at * n + i) * n + j] = norms[i] + norms[j] + dot(weighted.data(), words + (size_t)j * dim, dim);
        }
    }
    value_costs.resize((size_t)heads * value_rounds / 2 * m * m);
    value_probes.resize((size_t)heads * value_rounds * m * dim);
    for (int at = 0; at < heads * value_rounds * m; at++) {
        const float *word = values + (size_t)at * dim, *metric = value_metric + (size_t)(at / (value_rounds * m)) * dim * dim;
        for (int c = 0; c < dim; c++) value_probes[(size_t)at * dim + c] = dot(metric + (size_t)c * dim, word, dim);
    }
    for (int two = 0; two < heads * value_rounds / 2; two++) {
        const float *words = values + (size_t)two * 2 * m * dim, *probes = value_probes.data() + (size_t)two * 2 * m * dim;
        std::vector<float> norms(2 * m);
        for (int j = 0; j < 2 * m; j++) norms[j] = dot(probes + (size_t)j * dim, words + (size_t)j * dim, dim) / 2;
        for (int i = 0; i < m; i++)
            for (int j = 0; j < m; j++)
                value_costs[((size_t)two * m + i) * m + j] =
                    norms[i] + norms[m + j] + dot(probes + (size_t)i * dim, words + (size_t)(m + j) * dim, dim);
    }
    value_rows = values;
    if (columns != dim) {
        padded_values.assign((size_t)heads * value_rounds * m * columns, 0);
        for (int at = 0; at < heads * value_rounds * m; at++)
            std::memcpy(padded_values.data() + (size_t)at * columns, values + (size_t)at * dim, sizeof(float) * dim);
        value_rows = padded_values.data();
    }
}

void VqBooks::rotate_by(const float* rotary, int half, float rotary_gain) {
    gain = rotary_gain;
    frequencies.assign(lanes, 0);
    for (int p = 0; p < half && p < dim / 2; p++) frequencies[p] = rotary[p];
    turns.resize((size_t)(VQ_BLOCK + 1) * 2 * lanes);
    for (int t = 0; t <= VQ_BLOCK; t++)
        for (int p = 0; p < lanes; p++) {
            const double angle = (double)t * frequencies[p];
            turns[(size_t)t * 2 * lanes + p] = (float)std::cos(angle);
            turns[((size_t)t * 2 + 1) * lanes + p] = (float)std::sin(angle);
        }
}

}  // namespace orchard
