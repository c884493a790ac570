// Sequences under a budget, as Python sees them (orchard/ops/kernels/native/kept.py). Python has checked every number.
#include <exception>

#include "kept.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using orchard::Cache;
using orchard::Engine;
using orchard::Kept;

// Empty, in the place of what was there: 0 where there is no memory.
EXPORT int orchard_kept_open(const Engine* engine, Cache* cache, int sequence, const int32_t* budgets, int block, int scratch) {
    try {
        cache->budget(sequence, std::make_shared<Kept>(engine->plan(), budgets, block, scratch));
    } catch (const std::exception&) {
        return 0;
    }
    return 1;
}

EXPORT size_t orchard_kept_memory(const Cache* cache, int sequence) { return cache->kept(sequence)->memory(); }

EXPORT int orchard_kept_tokens(const Cache* cache, int sequence) { return cache->kept(sequence)->tokens(); }

// Tokens that may be kept before some must go; and rows that have a slot, kept or not.
EXPORT int orchard_kept_room(const Cache* cache, int sequence) { return cache->kept(sequence)->room(); }
EXPORT int orchard_kept_rows(const Cache* cache, int sequence) {
    return cache->kept(sequence)->limit() - cache->kept(sequence)->tokens();
}

// Tokens that every head of every store has, [stores][heads].
EXPORT void orchard_kept_counts(const Engine* engine, const Cache* cache, int sequence, int32_t* counts) {
    const auto& stores = engine->plan().stores;
    for (size_t store = 0; store < stores.size(); store++)
        for (int head = 0; head < stores[store].heads; head++) *counts++ = cache->kept(sequence)->count((int)store, head);
}

EXPORT int orchard_kept_keep(Cache* cache, int sequence, int tokens) { return cache->kept(sequence)->keep(tokens); }
EXPORT int orchard_kept_back(Cache* cache, int sequence, int tokens) { return cache->kept(sequence)->back(tokens); }

EXPORT int orchard_kept_compact(Cache* cache, int sequence, const int32_t* counts, const int32_t* slots, const int32_t* budgets,
                                int scratch, int threads) {
    try {
        cache->kept(sequence)->compact(counts, slots, budgets, scratch, threads);
    } catch (const std::exception&) {
        return 0;
    }
    cache->bound(sequence);
    return 1;
}

EXPORT void orchard_kept_read(const Cache* cache, int sequence, int store, int head, float* k, float* v) {
    cache->kept(sequence)->read(store, head, k, v);
}

EXPORT size_t orchard_kept_bytes(const Cache* cache, int sequence, const int32_t* counts) {
    return cache->kept(sequence)->bytes(counts);
}
EXPORT void orchard_kept_take(const Cache* cache, int sequence, uint8_t* to) { cache->kept(sequence)->take(to); }
EXPORT void orchard_kept_put(Cache* cache, int sequence, const int32_t* counts, const uint8_t* from) {
    cache->kept(sequence)->put(counts, from);
    cache->bound(sequence);
}

// Steps for rows as in orchard_engine_run; the queries of one sequence are followed (see Watch in engine.h).
EXPORT int orchard_engine_watch(Engine* engine, Cache* cache, int first, int last, int prompt, int count, const int32_t* tokens,
                                const int32_t* sequences, const int32_t* positions, int wanted_count, const int32_t* wanted,
                                float* scores, int sequence, float* best, int sum) {
    return engine->run(*cache, first, last, prompt != 0, count, tokens, sequences, positions, wanted_count, wanted, scores,
                       orchard::Watch{sequence, best, sum != 0});
}
