// What Python may call of the linear kernels: every one by itself, at any level, for tests and for saying what runs here.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace orchard;

Weight weight_of(int kind, int group, int minimum, int rows, int cols, const uint8_t* data) {
    Weight w;
    w.kind = (Kind)kind, w.group = group, w.minimum = minimum, w.rows = rows, w.cols = cols, w.data = data;
    return w;
}

// Zeroed, on a boundary of 64 bytes.
struct Room {
    explicit Room(size_t bytes) : bytes_((bytes + 63) / 64 * 64), at(std::aligned_alloc(64, bytes_ ? bytes_ : 64)) {
        if (at) std::memset(at, 0, bytes_);
    }
    ~Room() { std::free(at); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    size_t bytes_;
    void* at;
};

}  // namespace

// The best level of this machine (kernels.h): 0 portable, 1 AVX2 or NEON, 2 AVX-512, 3 with matrix units.
EXPORT int orchard_cpu_level() {
    if (matrix_kernels(3)) return 3;
    for (int level = 2; level > 0; --level)
        if (linear_kernels(level) != linear_kernels(level - 1)) return level;
    return 0;
}

// Names of the instruction sets that run at a level (-1: the best): of one row after another, and of many at once ("" without
// matrix units).
EXPORT const char* orchard_kernel_names(int level, int many) {
    if (!many) return linear_kernels(level)->name;
    const MatrixKernels* const kernels = matrix_kernels(level);
    return kernels ? kernels->name : "";
}

// Rows that one call of `orchard_linear_q` takes at a level.
EXPORT int orchard_linear_most(int level) { return linear_kernels(level)->most; }

EXPORT int64_t orchard_linear_bytes(int kind, int group, int minimum, int rows, int cols) {
    return (int64_t)weight_of(kind, group, minimum, rows, cols, nullptr).bytes();
}

EXPORT void orchard_linear_quantise(int level, const float* x, int cols, int padded, int group, int8_t* digits,
                                    float* scale, float* sum) {
    linear_kernels(level)->quantise(x, cols, padded, group, digits, scale, sum);
}

EXPORT void orchard_linear_q(int level, int kind, int group, int minimum, int rows, int cols, const uint8_t* data, int first,
                             int last, int8_t* digits, float* scale, float* sum, int ldd, int ldg, int T, float* y,
                             int ldy, int add) {
    const QuantRows x{digits, scale, sum, ldd, ldg};
    linear_kernels(level)->linear_q(weight_of(kind, group, minimum, rows, cols, data), first, last, x, T, y, ldy, add != 0);
}

EXPORT void orchard_linear_f(int level, int kind, int group, int rows, int cols, const uint8_t* data, int first, int last, const float* x,
                             int ldx, int T, float* y, int ldy, int add) {
    linear_kernels(level)->linear_f(weight_of(kind, group, 0, rows, cols, data), first, last, x, ldx, T, y, ldy, add != 0);
}

EXPORT void orchard_linear_row(int level, int kind, int group, int minimum, int rows, int cols, const uint8_t* data, int r,
                               float* out) {
    linear_kernels(level)->row(weight_of(kind, group, minimum, rows, cols, data), r, out);
}

// Packs rows [0, T) of x in pieces of 32, makes the panel of blocks [first, last) and multiplies rows [row0, row1). y: as
// in MatrixKernels::multiply. Answers 0, or -1 where there are no matrix units or no memory.
EXPORT int orchard_matrix_multiply(int level, int kind, int group, int minimum, int rows, int cols, const uint8_t* data,
                                   int first, int last, const float* x, int ldx, int T, int row0, int row1, float* y, int ldy,
                                   int add) {
    const MatrixKernels* const kernels = matrix_kernels(level);
    if (!kernels) return -1;
    const Weight w = weight_of(kind, group, minimum, rows, cols, data);
    Room packed(kernels->packed_bytes(T, cols)), panel(kernels->panel_bytes(w, last - first));
    if (!packed.at || !panel.at) return -1;
    std::memset(packed.at, 0xff, packed.bytes_);  // not-a-number wherever `pack` forgets something
    std::memset(panel.at, 0xff, panel.bytes_);
    for (int t = 0; t < T; t += 32) kernels->pack(x, ldx, T, cols, t, t + 32 < T ? t + 32 : T, packed.at);
    kernels->panel(w, first, last, panel.at);
    kernels->begin();
    kernels->multiply(w, panel.at, first, last, packed.at, T, row0, row1, y, ldy, add != 0);
    kernels->end();
    return 0;
}
