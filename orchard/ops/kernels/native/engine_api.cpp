// The engine as Python sees it (orchard/ops/kernels/native/program.py).
#include <new>

#include "engine.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using orchard::Cache;
using orchard::Engine;

EXPORT Engine* orchard_engine_new(const int64_t* words, int threads, int level) {
    try {
        return new Engine(orchard::read_plan(words), threads, level);
    } catch (const std::exception&) {  // no memory, or no threads to be had
        return nullptr;
    }
}

EXPORT void orchard_engine_delete(Engine* engine) { delete engine; }

EXPORT Cache* orchard_cache_new(const Engine* engine, int sequences, int length, int chunk) {
    try {
        return new Cache(engine->plan(), sequences, length, chunk);
    } catch (const std::exception&) {
        return nullptr;
    }
}

EXPORT void orchard_cache_delete(Cache* cache) { delete cache; }

// A sequence that may grow to `length` tokens, with memory for as many as it has. `reserve` takes some now: 0 where there is none.
EXPORT void orchard_cache_open(Cache* cache, int sequence, int length) { cache->open(sequence, length); }

EXPORT int orchard_cache_reserve(Cache* cache, int sequence, int tokens) {
    try {
        cache->reserve(sequence, tokens);
    } catch (const std::exception&) {
        return 0;
    }
    return 1;
}

// The first tokens of one sequence into another: 1 done, 0 cannot be, -1 no memory.
EXPORT int orchard_cache_copy(Cache* cache, int source, int target, int tokens) {
    try {
        return cache->copy(source, target, tokens);
    } catch (const std::exception&) {
        return -1;
    }
}

// Bytes of memory of a sequence of so many tokens; of all sequences now where `tokens` is negative.
EXPORT size_t orchard_cache_memory(const Cache* cache, int tokens) { return tokens < 0 ? cache->memory() : cache->memory(tokens); }

EXPORT void orchard_cache_release(Cache* cache, int sequence) { cache->release(sequence); }

// Bytes that `tokens` tokens of a sequence take; copying them out; copying the first `tokens` of `held` into another cache.
EXPORT size_t orchard_cache_bytes(const Cache* cache, int tokens) { return cache->bytes(tokens); }

EXPORT void orchard_cache_take(const Cache* cache, int sequence, int tokens, uint8_t* to) { cache->take(sequence, tokens, to); }

EXPORT void orchard_cache_put(Cache* cache, int sequence, int tokens, int held, const uint8_t* from) {
    cache->put(sequence, tokens, held, from);
}

EXPORT int orchard_engine_run(Engine* engine, Cache* cache, int first, int last, int prompt, int count, const int32_t* tokens,
                              const int32_t* sequences, const int32_t* positions, int wanted_count, const int32_t* wanted,
                              float* scores) {
    return engine->run(*cache, first, last, prompt != 0, count, tokens, sequences, positions, wanted_count, wanted, scores);
}

// The rows of a buffer as they are between two calls: for steps that run in torch.
EXPORT float* orchard_engine_buffer(const Engine* engine, int number) { return engine->buffer(number); }

// A step whose experts live elsewhere, part by part (0 choose, 1 compute what has a slot, 2 add up); what it chose; its rows.
EXPORT void orchard_engine_part(Engine* engine, int step, int part, const int32_t* slots) {
    engine->part(step, (Engine::Part)part, slots);
}
EXPORT int32_t* orchard_engine_choices(const Engine* engine) { return engine->choices(); }
EXPORT int orchard_engine_rows(const Engine* engine) { return engine->rows(); }

EXPORT int orchard_engine_threads(const Engine* engine) { return engine->threads(); }

// Seconds that thread 0 spent on each kind of step since timing was last turned on; then [14] calls of few rows, [15] those of
// them that ran with one thread because another program wanted a core.
EXPORT void orchard_engine_timing(Engine* engine, int on, double* seconds) {
    for (int kind = 0; seconds && kind < 16; kind++) seconds[kind] = engine->seconds.total[kind];
    if (seconds) seconds[14] = engine->seconds.calls, seconds[15] = engine->seconds.alone;
    engine->seconds = Engine::Seconds();
    engine->timed = on != 0;
}
