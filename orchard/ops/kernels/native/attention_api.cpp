// The attention kernels one by one for the tests: each hook takes the level of the kernels it calls.
#include <stdlib.h>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using orchard::AttentionKernels;
using orchard::Store;
using orchard::Visible;

// What Python fills in; the same fields as `Store`.
struct AttentionStore {
    int32_t codec, heads, dim, width, capacity;
    uint8_t *k, *v;
    float *k_scale, *v_scale;
};

// The same fields as `Visible`.
struct AttentionSeen {
    const int32_t* positions;
    int32_t first, last, query, window, keep, sinks;
};

static Store store_of(const AttentionStore* s) {
    Store store;
    store.codec = (orchard::Codec)s->codec;
    store.heads = s->heads, store.dim = s->dim, store.width = s->width, store.capacity = s->capacity;
    store.k = s->k, store.v = s->v, store.k_scale = s->k_scale, store.v_scale = s->v_scale;
    return store;
}

static Visible seen_of(const AttentionSeen* s) {
    return Visible{s->positions, s->first, s->last, s->query, s->window, s->keep, s->sinks};
}

// Runs `work(scratch)` with freshly allocated memory full of NaN, so that a kernel that reads what it did not write is found out.
template <class Work>
static void with_scratch(size_t bytes, const Work& work) {
    uint8_t* memory = (uint8_t*)malloc(bytes + 64);
    for (size_t i = 0; i < bytes + 64; i++) memory[i] = 0xff;
    work((void*)memory);
    free(memory);
}

// The name of the kernels that `level` gives on this machine.
EXPORT const char* orchard_attention_name(int level) { return orchard::attention_kernels(level)->name; }

EXPORT int orchard_attention_has_many(int level) { return orchard::attention_kernels(level)->many != nullptr; }

EXPORT void orchard_attention_put(int level, const AttentionStore* store, int head, int slot, const float* k, const float* v) {
    orchard::attention_kernels(level)->put(store_of(store), head, slot, k, v);
}

EXPORT void orchard_attention_part(int level, const AttentionStore* store, int head, const float* q, int ldq, int count,
                                   float scale, float softcap, const AttentionSeen* seen, float* out, int ldo, float* most,
                                   float* total) {
    const AttentionKernels* kernels = orchard::attention_kernels(level);
    Store s = store_of(store);
    Visible visible = seen_of(seen);
    with_scratch(kernels->scratch_bytes(s, visible.last - visible.first, count), [&](void* scratch) {
        kernels->part(s, head, q, ldq, count, scale, softcap, visible, out, ldo, most, total, scratch);
    });
}

// Answers 0, and does nothing, where the level has no such kernel.
EXPORT int orchard_attention_many(int level, const AttentionStore* store, int head, const float* q, int ldq, int count, int T,
                                  float scale, float softcap, const AttentionSeen* seen, float* out, int ldo) {
    const AttentionKernels* kernels = orchard::attention_kernels(level);
    Store s = store_of(store);
    if (!kernels->many || s.codec == orchard::Codec::F32) return 0;
    with_scratch(kernels->many_scratch_bytes(s, count), [&](void* scratch) {
        kernels->many(s, head, q, ldq, count, T, scale, softcap, seen_of(seen), out, ldo, scratch);
    });
    return 1;
}
