// Choosing a token from one row of scores; `orchard/ops/kernels/sampling.py` has the plain twin and the meaning of each step.
//
// Scores are float32, sums float64. Vectors are the compilers' own (GCC and Clang, every processor): without leave to reorder
// float arithmetic they do not vectorise a search for the largest number or a sum by themselves.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace orchard {
namespace {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef double Double2 __attribute__((vector_size(16)));
typedef uint64_t Word2 __attribute__((vector_size(16)));

template <class Vector, class Number>
Vector load(const Number* from) {
    Vector out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

constexpr int LANES = 16;
constexpr int CHUNK = 256;  // scores; lane l of a chunk holds those at l, l + LANES, l + 2 * LANES, …

// The best score of every lane of every chunk. Looking at these first lets later steps skip most of the row.
struct Peaks {
    std::vector<float> lanes;  // [chunks][LANES]
    float best = 0;
    bool finite = true;
};

// One chunk: its peaks; returns whether every score is finite.
bool chunk_peaks(const float* x, float* peaks) {
    Float4 most[LANES / 4];
    Int4 wild = {0, 0, 0, 0};
    for (int v = 0; v < LANES / 4; ++v) most[v] = load<Float4>(x + 4 * v);
    for (int start = 0; start < CHUNK; start += LANES) {
        for (int v = 0; v < LANES / 4; ++v) {
            Float4 some = load<Float4>(x + start + 4 * v);
            most[v] = some > most[v] ? some : most[v];
            wild |= ((Int4)some & 0x7f800000) == 0x7f800000;  // infinite or NaN
        }
    }
    std::memcpy(peaks, most, sizeof most);
    return !(wild[0] | wild[1] | wild[2] | wild[3]);
}

void find_peaks(const float* x, int64_t count, Peaks& peaks) {
    peaks.lanes.resize((count + CHUNK - 1) / CHUNK * LANES);
    peaks.finite = true;
    float* out = peaks.lanes.data();
    int64_t whole = count / CHUNK * CHUNK;
    for (int64_t start = 0; start < whole; start += CHUNK, out += LANES) peaks.finite &= chunk_peaks(x + start, out);
    if (whole < count) {
        float rest[CHUNK];
        for (int i = 0; i < CHUNK; ++i) rest[i] = x[std::min(whole + i, count - 1)];  // repeated: the best stays the best
        peaks.finite &= chunk_peaks(rest, out);
    }
    Float4 most = load<Float4>(peaks.lanes.data());
    for (size_t i = 0; i < peaks.lanes.size(); i += 4) {
        Float4 some = load<Float4>(&peaks.lanes[i]);
        most = some > most ? some : most;
    }
    peaks.best = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

struct Scale {
    float best, temperature;
    bool plain;
    float operator()(float score) const { return plain ? score : (score - best) / temperature; }
};

// What is left of the row, in the order of ids. The vectors are only ever made longer; `count` says how much of them is meant.
struct Left {
    std::vector<int32_t> ids;
    std::vector<float> scores;  // counted from the best score and divided by the temperature, or as they came
    std::vector<double> mass;   // exp(score - best), once it is known
    size_t count = 0;

    void room_for(size_t most) {
        if (ids.size() >= most) return;
        ids.resize(most);
        scores.resize(most + 4);  // mass is worked out by the vector
        mass.resize(most + 4);
    }
    void move(size_t from, size_t to) {
        ids[to] = ids[from];
        scores[to] = scores[from];
        mass[to] = mass[from];
    }
    template <class Stays>
    void keep(Stays stays) {
        size_t kept = 0;
        for (size_t i = 0; i < count; ++i)
            if (stays(i)) move(i, kept++);
        count = kept;
    }
};

// All scores of at least `floor`; chunks whose peaks lie below are not looked at.
void gather(const float* x, int64_t count, const Peaks& peaks, const Scale& scale, float floor, Left& left) {
    left.room_for(count);
    size_t found = 0;
    const float* lanes = peaks.lanes.data();
    for (int64_t start = 0; start < count; start += CHUNK, lanes += LANES) {
        bool any = false;
        for (int l = 0; l < LANES; ++l) any |= scale(lanes[l]) >= floor;
        if (!any) continue;
        int length = int(std::min<int64_t>(CHUNK, count - start));
        int32_t* ids = left.ids.data() + found;
        float* scores = left.scores.data() + found;
        for (int i = 0; i < length; ++i) ids[i] = int32_t(start) + i;
        for (int i = 0; i < length; ++i) scores[i] = scale(x[start + i]);
        int staying = 0;
        for (int i = 0; i < length; ++i) staying += scores[i] >= floor;
        found += staying;
        if (staying == length) continue;
        for (int i = 0, kept = 0; i < length; ++i) {  // written in any case, counted if it stays: no branch to guess
            ids[kept] = ids[i];
            scores[kept] = scores[i];
            kept += scores[i] >= floor;
        }
    }
    left.count = found;
}

// A score that at least k scores reach: the k-th best of the lanes' peaks, each of which is one of the scores.
float reached_by(int64_t k, const Peaks& peaks, const Scale& scale, std::vector<float>& order) {
    // Without the last chunk: it may be padded with repeats of a score, so that two of its peaks are one score.
    order.assign(peaks.lanes.begin(), peaks.lanes.end() - LANES);
    if (int64_t(order.size()) < k) return -FLT_MAX;
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), [](float a, float b) { return a > b; });
    return scale(order[k - 1]);
}

// Exactly the k best; the lower id first among equals.
void keep_best(Left& left, size_t k, std::vector<float>& order) {
    if (k >= left.count) return;
    order.assign(left.scores.begin(), left.scores.begin() + left.count);
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), [](float a, float b) { return a > b; });
    float least = order[k - 1];
    size_t better = 0;
    for (size_t i = 0; i < left.count; ++i) better += left.scores[i] > least;
    size_t equals = k - better;
    left.keep([&](size_t i) { return left.scores[i] > least || (left.scores[i] == least && equals && equals--); });
}

// exp(x) for x <= 0 to within a few units of the last place: x = k ln 2 + r, then the series of exp(r) to r^12 (what is left out
// is below 2e-16 of it), then k is added to the exponent. Inlined everywhere, so that each caller's instructions are used.
template <class Doubles, class Words>
inline __attribute__((always_inline)) void exp_below(Doubles& x) {
    constexpr double ROUND = 6755399441055744.0;  // 1.5 · 2^52: adding it leaves the nearest whole number in the low bits
    constexpr double SERIES[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                 1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,        1.0};
    Doubles shifted = x * 1.4426950408889634074 + ROUND;
    Doubles k = shifted - ROUND;
    Doubles r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;  // ln 2 in two parts
    Doubles sum = r * (1.0 / 479001600) + SERIES[0];
    for (int i = 1; i < 12; ++i) sum = sum * r + SERIES[i];
    Doubles power = (Doubles)(((Words)shifted << 52) + (uint64_t(1023) << 52));
    x = x < -708.0 ? x * 0 : sum * power;  // further down a float64 has no normal number
}

template <class Doubles, class Words>
inline __attribute__((always_inline)) void exp_of(const float* scores, size_t count, float best, double* mass) {
    constexpr int WIDTH = sizeof(Doubles) / sizeof(double);
    for (size_t i = 0; i < count; i += WIDTH) {  // whole vectors: both arrays have room for one more
        Doubles x;
        for (int l = 0; l < WIDTH; ++l) x[l] = scores[i + l];
        x -= double(best);
        exp_below<Doubles, Words>(x);
        std::memcpy(mass + i, &x, sizeof x);
    }
}

#if defined(__x86_64__)
typedef double Double4 __attribute__((vector_size(32)));
typedef uint64_t Word4 __attribute__((vector_size(32)));

// Twice as wide, and a product and a sum in one: the one loop here whose arithmetic, not whose memory, takes the time.
__attribute__((target("avx2,fma"))) void exp_of_wide(const float* scores, size_t count, float best, double* mass) {
    exp_of<Double4, Word4>(scores, count, best, mass);
}
#endif

void find_mass(Left& left, float best) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wide) return exp_of_wide(left.scores.data(), left.count, best, left.mass.data());
#endif
    exp_of<Double2, Word2>(left.scores.data(), left.count, best, left.mass.data());
}

double sum_of(const double* values, size_t count) {
    Double2 sums[4] = {};
    size_t whole = count / 8 * 8;
    for (size_t i = 0; i < whole; i += 8)
        for (int v = 0; v < 4; ++v) sums[v] += load<Double2>(values + i + 2 * v);
    Double2 both = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = both[0] + both[1];
    for (size_t i = whole; i < count; ++i) sum += values[i];
    return sum;
}

// In the order of likelihood, by score: two masses may differ only by rounding.
struct Share {
    float score;
    int32_t place;
    bool operator<(const Share& other) const { return score != other.score ? score > other.score : place < other.place; }
};

// The smallest set of likeliest tokens whose share of the mass reaches p. Halves are put aside whole, so that only what lies
// around the border of the set is ever sorted.
void keep_nucleus(Left& left, double p, int64_t vocabulary, std::vector<Share>& shares) {
    double total = sum_of(left.mass.data(), left.count), wanted = p * total;
    double bar = (1 - p) / double(vocabulary) * total;  // all tokens below this together have less than 1 - p
    shares.clear();
    for (size_t i = 0; i < left.count; ++i)
        if (left.mass[i] >= bar) shares.push_back({left.scores[i], int32_t(i)});
    auto first = shares.begin(), last = shares.end();
    double inside = 0;
    while (last - first > 16) {
        auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last);
        double half = 0;
        for (auto share = first; share != middle; ++share) half += left.mass[share->place];
        if (inside + half >= wanted) {
            last = middle;
        } else {
            inside += half;
            first = middle;
        }
    }
    std::sort(first, last);
    while (first != last && inside < wanted) inside += left.mass[(first++)->place];
    if (first == shares.begin()) return;  // no mass at all: cannot be, as the best token has 1
    std::sort(shares.begin(), first, [](const Share& a, const Share& b) { return a.place < b.place; });
    left.count = 0;
    for (auto share = shares.begin(); share != first; ++share) left.move(share->place, left.count++);
}

// The place at which the summed mass passes `uniform` of all of it.
size_t place_of(const Left& left, double uniform, std::vector<double>& sums) {
    sums.clear();
    for (size_t start = 0; start < left.count; start += CHUNK)
        sums.push_back(sum_of(&left.mass[start], std::min<size_t>(CHUNK, left.count - start)));
    double total = 0, below = 0;
    for (double sum : sums) total += sum;
    double target = uniform * total;
    size_t chunk = 0;
    while (chunk + 1 < sums.size() && below + sums[chunk] <= target) below += sums[chunk++];
    for (size_t i = chunk * CHUNK; i < left.count; ++i) {
        below += left.mass[i];
        if (below > target) return i;
    }
    return left.count - 1;
}

// Kept by the thread: a vocabulary's worth of memory, asked of the system anew for each token, would cost more than the work.
struct Scratch {
    Peaks peaks;
    Left left;
    std::vector<float> order;
    std::vector<Share> shares;
    std::vector<double> sums;
};

Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

int64_t greedy(const float* scores, int64_t count, Peaks& peaks) {
    find_peaks(scores, count, peaks);
    if (!peaks.finite) return -1;
    auto peak = std::find(peaks.lanes.begin(), peaks.lanes.end(), peaks.best);
    int64_t start = (peak - peaks.lanes.begin()) / LANES * CHUNK;
    return std::find(scores + start, scores + count, peaks.best) - scores;
}

struct Choice {
    double temperature;
    int64_t top_k;
    double top_p, distance;
};

// Not inlined: the scratch comes as a plain reference, which is cheaper to reach than a thread's own variables.
__attribute__((noinline)) int64_t choose(const float* scores, int64_t count, const Choice& choice, double uniform, Scratch& at) {
    find_peaks(scores, count, at.peaks);
    if (!at.peaks.finite) return -1;
    Scale scale{at.peaks.best, float(choice.temperature), choice.temperature == 1};
    float best = scale(at.peaks.best), near = float(choice.distance);
    float floor = -FLT_MAX;  // what a tiny temperature sent to -inf is out
    bool nucleus = choice.top_p < 1, far = near >= -FLT_MAX;
    if (choice.top_k > 0 && choice.top_k < count)
        floor = std::max(floor, reached_by(choice.top_k, at.peaks, scale, at.order));
    if (far && !nucleus) floor = std::max(floor, best + near - 1e-5f * (std::abs(best) - near));  // rounding excludes none
    gather(scores, count, at.peaks, scale, floor, at.left);
    if (choice.top_k > 0) keep_best(at.left, size_t(choice.top_k), at.order);
    find_mass(at.left, best);
    if (nucleus) keep_nucleus(at.left, choice.top_p, count, at.shares);
    if (far) at.left.keep([&](size_t i) { return !(at.left.scores[i] - best < near); });
    return at.left.ids[place_of(at.left, uniform, at.sums)];
}

}  // namespace

// The best score's token, the lowest id among equals; -1 where any score is infinite or NaN.
int64_t sample_greedy(const float* scores, int64_t count) { return greedy(scores, count, scratch().peaks); }

// temperature, top_k (0: all), top_p (1: all), distance of min_p (-inf: all), then the draw; -1 as above.
int64_t sample_choose(const float* scores, int64_t count, double temperature, int64_t top_k, double top_p, double distance,
                      double uniform) {
    return choose(scores, count, {temperature, top_k, top_p, distance}, uniform, scratch());
}

// out[i] = scores[i] where bit i % 8 of bits[i / 8] is set, else minus infinity; `count` is a multiple of 8.
void sample_mask(const float* scores, const uint8_t* bits, int64_t count, float* out) {
    static const Int4 NIBBLES[16] = {
        {0, 0, 0, 0},   {-1, 0, 0, 0},   {0, -1, 0, 0},   {-1, -1, 0, 0},   {0, 0, -1, 0},   {-1, 0, -1, 0},   {0, -1, -1, 0},   {-1, -1, -1, 0},
        {0, 0, 0, -1},  {-1, 0, 0, -1},  {0, -1, 0, -1},  {-1, -1, 0, -1},  {0, 0, -1, -1},  {-1, 0, -1, -1},  {0, -1, -1, -1},  {-1, -1, -1, -1}};
    const int32_t nothing = (int32_t)0xff800000;  // minus infinity
    for (int64_t at = 0; at < count; at += 8)
        for (int half = 0; half < 2; ++half) {
            const Int4 stays = NIBBLES[bits[at / 8] >> (4 * half) & 15];
            const Int4 some = load<Int4>(scores + at + 4 * half);
            const Int4 masked = (some & stays) | (~stays & nothing);
            std::memcpy(out + at + 4 * half, &masked, sizeof masked);
        }
}

}  // namespace orchard
