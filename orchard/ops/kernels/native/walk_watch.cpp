// Sequences under a budget: memory for their calls, and following their queries.
//
// A call that is watched computes the scores of attention a second time, without the values, from keys that are kept by then. Threads
// share the work so that what comes out does not depend on who was first.
#include "kept.h"
#include "walk.h"

namespace orchard {

void Engine::reserve_kept(const Cache& cache, int rows, const int32_t* sequences, const Watch& watch) {
    for (int row = 0; row < rows; row++) {
        const Kept* kept = cache.kept(sequences[row]);
        if (!kept || (row > 0 && sequences[row] == sequences[row - 1])) continue;
        for (const Step& step : plan_.steps) {
            if (step.kind != StepKind::Attend) continue;
            const Store store = kept->largest(step.store);
            const int group = step.heads / step.kv_heads, queries = group > WATCHED ? group : WATCHED;
            size_t best = 0;
            for (int head = 0; head < step.kv_heads; head++) best = best > (size_t)kept->count(step.store, head) ? best : kept->count(step.store, head);
            const size_t floats = watching_->floats(store, queries, store.capacity) + (size_t)queries * store.width + best;
            for (Scratch& scratch : scratch_) {
                if (attention_->many) scratch.attention.reserve(attention_->many_scratch_bytes(store, group < MAX_GROUP ? group : MAX_GROUP));
                if (watch.best && watch.sequence == sequences[row]) scratch.watch.reserve(floats * sizeof(float));
            }
        }
    }
}

// `turned`: queries have been normalised and rotated where they stand.
void Walk::watch(const Step& step, bool turned) {
    const int sequence = engine.watch_.sequence, group = step.heads / step.kv_heads, dim = step.dim;
    const Kept* kept = engine.cache_->kept(sequence);
    int first = 0;
    while (first < rows() && engine.rows_.sequences[first] != sequence) first++;
    int count = 0;
    while (first + count < rows() && engine.rows_.sequences[first + count] == sequence) count++;
    float* best = engine.watch_.best;
    for (int store = 0; store < step.store; store++)
        for (int head = 0; head < engine.plan_.stores[store].heads; head++) best += kept->count(store, head);

    // Tasks are some rows of one key head; a thread's tasks follow each other, so that it has few heads. Sums depend on their order: one
    // thread does all rows of a head.
    const int together = group < WATCHED ? WATCHED / group : 1, blocks = (count + together - 1) / together;
    const bool sum = engine.watch_.sum;
    const int tasks = sum ? step.kv_heads : step.kv_heads * blocks;
    for (int head = 0; head < step.kv_heads; head++) {
        const int shown = kept->count(step.store, head), base = kept->base(step.store, head);
        const Store store = kept->view(step.store, head);
        float* queries = scratch.watch.as<float>();
        float* mine = queries + (size_t)(together * group) * store.width;
        float* room = mine + shown;
        bool any = false;
        for (int block = 0; block < blocks; block++) {
            const int task = sum ? head : head * blocks + block;
            if (task < from(tasks) || task >= upto(tasks)) continue;
            if (!any) std::memset(mine, 0, (size_t)shown * sizeof(float));
            any = true;
            const int start = block * together, some = count - start < together ? count - start : together;
            std::memset(queries, 0, (size_t)some * group * store.width * sizeof(float));
            for (int row = 0; row < some; row++)
                for (int i = 0; i < group; i++) {
                    float* query = queries + (size_t)(row * group + i) * store.width;
                    const int place = first + start + row;
                    std::memcpy(query, buffer(step.src) + (size_t)place * width(step.src) + ((size_t)head * group + i) * dim, (size_t)dim * 4);
                    if (!turned) turn(step, query, place, step.q_norm);
                    engine.vector_->scale(query, step.scale, dim);
                }
            const int slot = engine.rows_.positions[first + start] - base;
            engine.watching_->look(store, 0, queries, some * group, group, slot, step.window, step.bound, shown, sum ? 1.0f / group : 0,
                                    mine, room);
        }
        if (any) {
            std::lock_guard<std::mutex> hold(engine.watch_mutex_);
            for (int slot = 0; slot < shown; slot++)
                best[slot] = sum ? best[slot] + mine[slot] : mine[slot] > best[slot] ? mine[slot] : best[slot];
        }
        best += shown;
    }
    barrier();  // what attention writes may be where the queries are
}

}  // namespace orchard
