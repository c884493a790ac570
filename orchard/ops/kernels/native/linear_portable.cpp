// Linear kernels in plain C++: right everywhere, and written so that a compiler can use what vectors it knows of.
#include "linear_template.h"

namespace orchard {
namespace {

struct Plain {
    static constexpr int LANES = 8, MOST = 2;
    static constexpr bool QUADS = false;
    struct Floats {
        float lane[LANES];
    };
    struct Ints {
        int32_t lane[LANES];
    };
    struct Bytes {
        int16_t lane[4][LANES];  // [column][row]: widened, so that products need no care
    };
    static constexpr int strips(int T) { return T == 1 ? 2 : 1; }

    template <class Result, class Rule>
    static Result each(Rule rule) {
        Result result;
        for (int i = 0; i < LANES; ++i) result.lane[i] = rule(i);
        return result;
    }

    static Floats zero() { return everywhere(0.0f); }
    static Ints zeros() { return each<Ints>([](int) { return 0; }); }
    static Floats everywhere(float value) { return each<Floats>([=](int) { return value; }); }
    static Floats load(const float* from) { return each<Floats>([=](int i) { return from[i]; }); }
    static void store(float* to, const Floats& a) { std::memcpy(to, a.lane, sizeof a.lane); }
    static Floats add(const Floats& a, const Floats& b) {
        return each<Floats>([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static Floats multiply(const Floats& a, const Floats& b) {
        return each<Floats>([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Floats fused(const Floats& a, const Floats& b, const Floats& c) {
        return each<Floats>([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static Floats convert(const Ints& a) {
        return each<Floats>([&](int i) { return (float)a.lane[i]; });
    }
    static Ints round(const Floats& a) {
        return each<Ints>([&](int i) { return (int32_t)lrintf(a.lane[i]); });
    }
    static Floats halves(const uint8_t* from) {
        return each<Floats>([=](int i) { return float_of_half(half_at(from, i)); });
    }
    static Floats lower(const uint8_t* from) {
        return each<Floats>([=](int i) { return float_of_bfloat(half_at(from, 2 * i)); });
    }
    static Floats upper(const uint8_t* from) {
        return each<Floats>([=](int i) { return float_of_bfloat(half_at(from, 2 * i + 1)); });
    }
    static void store_bytes(int8_t* to, const Ints& a) {
        for (int i = 0; i < LANES; ++i) to[i] = (int8_t)a.lane[i];
    }
    static Ints less(const Ints& a, const Ints& b, int factor) {
        return each<Ints>([&](int i) { return a.lane[i] - b.lane[i] * factor; });
    }
    static int32_t total(const Ints& a) {
        int32_t sum = 0;
        for (int i = 0; i < LANES; ++i) sum += a.lane[i];
        return sum;
    }

    static Bytes bytes(const uint8_t* from) {
        Bytes result;
        for (int l = 0; l < 4; ++l)
            for (int i = 0; i < LANES; ++i) result.lane[l][i] = from[i * 4 + l];
        return result;
    }
    struct Four {
        int16_t column[4];
    };
    static Four four_bytes(const int8_t* from) { return {{from[0], from[1], from[2], from[3]}}; }
    template <int BITS>
    static Bytes part(const Bytes& a, int j) {
        Bytes result;
        for (int l = 0; l < 4; ++l)
            for (int i = 0; i < LANES; ++i)
                result.lane[l][i] =
                    BITS == 8 ? (int16_t)(a.lane[l][i] - 128) : (int16_t)((a.lane[l][i] >> (j * BITS)) & ((1 << BITS) - 1));
        return result;
    }
    template <int BITS>
    static Ints dot(Ints sum, const Bytes& codes, const Four& x) {
        for (int l = 0; l < 4; ++l)
            for (int i = 0; i < LANES; ++i) sum.lane[i] += codes.lane[l][i] * x.column[l];
        return sum;
    }

    struct Table {
        int16_t entry[16];
    };
    using Wide = Ints;
    static Table table(const int16_t* entries) {
        Table result;
        std::memcpy(result.entry, entries, sizeof result.entry);
        return result;
    }
    static Wide wide_zeros() { return zeros(); }
    static Ints narrowed(const Wide& sum) { return sum; }
    static void look_up(Wide& sum, const Table& table, const Bytes& codes, const int16_t* x) {
        for (int l = 0; l < 4; ++l)
            for (int i = 0; i < LANES; ++i) sum.lane[i] += table.entry[codes.lane[l][i]] * x[l];
    }
};

}  // namespace

extern const LinearKernels LINEAR_PORTABLE = {"portable", SMALL, quantise<Plain>, linear_q<Plain>, linear_f<Plain>, plain_row};

}  // namespace orchard
