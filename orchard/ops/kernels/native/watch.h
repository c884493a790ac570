// Which slots of a store queries look at: the scores of attention once more, without the values. One table per instruction set, all
// from watch_template.h.
#pragma once
#include <cstddef>

namespace orchard {

struct Store;

constexpr int WATCHED = 16;  // queries in one call, at the least: those of one row and key head may be more

struct WatchKernels {
    // best[s] = max(best[s], share of slot s in the softmax of a query), or where there is a `factor` best[s] += factor * share, for slots
    // [0, shown) and `queries` queries of key head `head`.
    // q: [queries][width], rotated, scaled and padded with zeros. Query i stands at slot first + i / group and sees the slots up to its own,
    // from itself - window + 1 on where there is a window. `softcap` as in attention (0: none). `scratch` has `floats` of them.
    void (*look)(const Store& store, int head, const float* q, int queries, int group, int first, int window, float softcap,
                 int shown, float factor, float* best, float* scratch);
    size_t (*floats)(const Store& store, int queries, int last);  // `last`: one past the last slot that is seen
};

const WatchKernels* watch_kernels(int level);  // as in kernels.h

}  // namespace orchard
