// One linear map a group of rows: x [rows][cols] sorted by group, weights [groups][out][cols] as torch keeps them.
#pragma once
#include <cstdint>

namespace orchard {

struct GroupedKernels {
    // y = x · wᵀ for `tokens` rows of x and weight rows [first, last) of one group. ldx, ldy: from row to row. `half`: weights are
    // bfloat16. What a row becomes does not depend, to the last bit, on how many others there are.
    void (*multiply)(const float* x, int64_t ldx, int tokens, const void* w, bool half, int cols, int first, int last, float* y,
                     int64_t ldy);
};

const GroupedKernels* grouped_kernels(int level);  // as in kernels.h

}  // namespace orchard
