// Stores of codes for the tests and for measurements: books made from arrays, one slot written, one part or run attended.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using orchard::Store;
using orchard::Visible;
using orchard::VqBooks;

// numbers: heads, dim, rounds and words of keys, rounds and words of values, exact, half (0: no rotation); arrays: keys, values, key_offset,
// value_offset, key_weight, value_metric, frequencies. The arrays have to stay.
EXPORT VqBooks* orchard_vq_new(const int32_t* numbers, const float* const* arrays, float gain) {
    VqBooks* books = new VqBooks();
    books->heads = numbers[0], books->dim = numbers[1];
    books->key_rounds = numbers[2], books->key_words = numbers[3], books->value_rounds = numbers[4], books->value_words = numbers[5];
    books->exact = numbers[6];
    books->keys = arrays[0], books->values = arrays[1], books->key_offset = arrays[2], books->value_offset = arrays[3];
    books->key_weight = arrays[4], books->value_metric = arrays[5];
    books->prepare();
    if (numbers[7]) books->rotate_by(arrays[6], numbers[7], gain);
    return books;
}

EXPORT void orchard_vq_delete(VqBooks* books) { delete books; }

static Store store_of(const VqBooks* books, int capacity, uint8_t* k, uint8_t* v, float* exact) {
    Store store;
    store.codec = orchard::Codec::VQ;
    store.heads = books->heads, store.dim = books->dim, store.capacity = capacity;
    store.k = k, store.v = v, store.books = books, store.exact = exact;
    return store;
}

EXPORT void orchard_vq_put(const VqBooks* books, int capacity, uint8_t* k, uint8_t* v, float* exact, int head, int slot,
                           const float* key, const float* value) {
    orchard::vq_put(store_of(books, capacity, k, v, exact), head, slot, key, value);
}

// Memory that no kernel has written to holds no numbers.
static void* no_numbers(size_t bytes) { return memset(malloc(bytes), 0xff, bytes); }

EXPORT void orchard_vq_part(int level, const VqBooks* books, int capacity, uint8_t* k, uint8_t* v, float* exact, int head,
                            const float* q, int count, float scale, float softcap, int first, int last, float* out, float* most,
                            float* total) {
    const orchard::VqKernels* kernels = orchard::attention_kernels(level)->vq;
    const Store store = store_of(books, capacity, k, v, exact);
    void* scratch = no_numbers(kernels->scratch_bytes(store, last - first, count));
    kernels->part(store, head, q, books->dim, count, scale, softcap, Visible{nullptr, first, last, last - 1, 0, 0, 0}, out, books->dim,
                  most, total, scratch);
    free(scratch);
}

// T queries at positions `query` and up; q and out are [T][count][dim].
EXPORT void orchard_vq_many(int level, const VqBooks* books, int capacity, uint8_t* k, uint8_t* v, float* exact, int head,
                            const float* q, int count, int T, float scale, float softcap, int first, int query, int window, float* out) {
    const orchard::VqKernels* kernels = orchard::attention_kernels(level)->vq;
    const Store store = store_of(books, capacity, k, v, exact);
    void* scratch = no_numbers(kernels->many_scratch_bytes(store, count, T));
    kernels->many(store, head, q, count * books->dim, count, T, scale, softcap, Visible{nullptr, first, query + T, query, window, 0, 0}, out,
                  count * books->dim, scratch);
    free(scratch);
}
