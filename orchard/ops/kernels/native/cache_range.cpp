// Keys and values of a stretch of a sequence's tokens, copied out and in, as Python sees it (program.py): beginnings that prompts
// share are kept stretch by stretch. Only for plans without rings, whose slots move. A stretch begins at a multiple of 32 tokens,
// because slots lie side by side in blocks of 32 at most; its bytes are in the order of Cache::take for so many tokens. Tokens that
// a store of codes keeps as they come are a sequence's first ones: only the stretch that begins with them has them.
#include <cstring>
#include <initializer_list>

#include "engine.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using orchard::Cache;
using orchard::Codec;
using orchard::Store;

// Calls visit(inside, offset, bytes) for the runs of bytes in a sequence's memory that hold `tokens` tokens from `first` on, and
// where each begins in a copy of `held` tokens.
template <class Visit>
static void stretch(const Cache* cache, int stores, int sequence, int first, int tokens, int held, const Visit& visit) {
    const size_t used = (tokens + 31) / 32 * 32, kept = (held + 31) / 32 * 32;
    size_t at = 0;
    for (int number = 0; number < stores; number++) {
        const Store store = cache->view(number, sequence);
        auto side = [&](uint8_t* array, size_t bytes) {
            for (int head = 0; head < store.heads; head++, at += kept * bytes)
                visit(array + ((size_t)head * store.capacity + first) * bytes, at, used * bytes);
        };
        side(store.k, store.k_slot_bytes()), side(store.v, store.v_slot_bytes());
        if (store.books && store.books->exact && first == 0) {
            const size_t bytes = store.books->exact_floats() * sizeof(float);
            visit(reinterpret_cast<uint8_t*>(store.exact), at, bytes);
            at += bytes;
        }
        if (store.codec != Codec::INT8) continue;
        for (float* array : {store.k_scale, store.v_scale})
            for (int head = 0; head < store.heads; head++, at += kept * sizeof(float))
                visit(reinterpret_cast<uint8_t*>(array + (size_t)head * store.capacity + first), at, used * sizeof(float));
    }
}

EXPORT void orchard_cache_take_range(const Cache* cache, int stores, int sequence, int first, int tokens, uint8_t* to) {
    stretch(cache, stores, sequence, first, tokens, tokens,
            [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(to + at, inside, bytes); });
}

EXPORT void orchard_cache_put_range(Cache* cache, int stores, int sequence, int first, int tokens, int held, const uint8_t* from) {
    stretch(cache, stores, sequence, first, tokens, held,
            [&](uint8_t* inside, size_t at, size_t bytes) { std::memcpy(inside, from + at, bytes); });
}
