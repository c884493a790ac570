// Attention over stores.
//
// Decoding: the work is cut into parts of PART slots per row and key head; whoever finishes the last part of a row and head merges
// them, in order, so that the result does not depend on the threads. The thread that owns the newest slot keeps the new
// key and value first, and nobody else looks there: no barrier is needed between keeping and attending.
// Several tokens of a sequence at once: all their keys and values are kept first. Reading a prompt, blocks of queries are then
// handed out.
#include <cmath>

#include "walk.h"

namespace orchard {
namespace {

struct Span {
    int first, last;  // slots
};

Span slots_of(const Store& store, const StoreSpec& spec, const Step& step, int position) {
    if (spec.keep) return {0, position + 1 < store.capacity ? position + 1 : store.capacity};
    int first = step.window && position - step.window + 1 > 0 ? position - step.window + 1 : 0;
    return {first, position + 1};
}

int parts_of(Span span, int size) { return (span.last + size - 1) / size - span.first / size; }

}  // namespace

// One head's vector in place: normalised, then rotated to its row's position.
void Walk::turn(const Step& step, float* x, int row, const NormRef& norm) const {
    if (norm.weight) engine.vector_->norm(x, norm.weight, norm.eps, step.dim, x);
    if (step.rotary < 0) return;
    const int half = engine.plan_.rotaries[step.rotary].half;
    engine.vector_->rotate(x, engine.cosines_[step.rotary].as<float>() + (size_t)row * half,
                           engine.sines_[step.rotary].as<float>() + (size_t)row * half, half);
}

// Put a row's new key and value of one head into the store.
void Walk::keep(const Step& step, int row, int head) {
    const int sequence = engine.rows_.sequences[row], position = engine.rows_.positions[row];
    float* k = buffer(step.k) + (size_t)row * width(step.k) + head * step.dim;
    const float* v = buffer(step.v) + (size_t)row * width(step.v) + head * step.dim;
    const StoreSpec& spec = engine.plan_.stores[step.store];
    if (!spec.books) turn(step, k, row, step.k_norm);
    else if (step.k_norm.weight) engine.vector_->norm(k, step.k_norm.weight, step.k_norm.eps, step.dim, k);  // codes are of unrotated keys
    const Cache::Look look = engine.cache_->look(step.store, sequence, head);
    engine.attention_->put(look.store, look.head, engine.cache_->slot(step.store, sequence, position - look.base), k, v);
}

void Walk::attend(const Step& step) {
    const bool watched = engine.watch_.best != nullptr;
    if (watched && step.k < 0) watch(step, false);  // what it reads is there already
    if ((watched || engine.long_runs_ || prompt) && step.k >= 0) {
        attend_runs(step);
    } else {
        attend_alone(step, rows() <= SMALL, step.k >= 0);
    }
}

// Every row by itself. `split`: parts of one row and head may go to different threads. A part goes to the thread in whose share
// of all the work its middle lies.
void Walk::attend_alone(const Step& step, bool split, bool keeps) {
    const StoreSpec& spec = engine.plan_.stores[step.store];
    constexpr long OVERHEAD = 24;  // of a part, in slots
    const int size = part_slots(spec);
    auto span_of = [&](int row, int head) {
        const Cache::Look look = engine.cache_->look(step.store, engine.rows_.sequences[row], head);
        return slots_of(look.store, spec, step, engine.rows_.positions[row] - look.base);
    };
    long total = 0, before = 0;
    for (int row = 0; row < rows(); row++)
        for (int head = 0; head < step.kv_heads; head++) {
            Span span = span_of(row, head);
            total += span.last - span.first + parts_of(span, size) * OVERHEAD;
        }
    auto mine = [&](long work) {
        long middle = before + work / 2;
        before += work;
        return middle * threads / total == thread;
    };
    for (int row = 0; row < rows(); row++) {
        for (int head = 0; head < step.kv_heads; head++) {
            const Span span = span_of(row, head);
            const int parts = parts_of(span, size), base = span.first / size;
            if (!split) {
                if (mine(span.last - span.first + parts * OVERHEAD)) attend_row(step, row, head, 0, parts, false, keeps);
                continue;
            }
            int first = parts, last = 0;  // the parts of one thread follow each other
            for (int part = 0; part < parts; part++) {
                int from = (base + part) * size, to = from + size;
                from = from > span.first ? from : span.first, to = to < span.last ? to : span.last;
                if (!mine(to - from + OVERHEAD)) continue;
                first = part < first ? part : first, last = part + 1;
            }
            if (first < last) attend_row(step, row, head, first, last, true, keeps);
        }
    }
}

// Parts [first_part, last_part) of one row and key head.
void Walk::attend_row(const Step& step, int row, int head, int first_part, int last_part, bool split, bool keeps) {
    const AttentionKernels& kernels = *engine.attention_;
    const StoreSpec& spec = engine.plan_.stores[step.store];
    const int sequence = engine.rows_.sequences[row];
    const Cache::Look look = engine.cache_->look(step.store, sequence, head);
    const Store& store = look.store;
    const int position = engine.rows_.positions[row] - look.base;
    const auto part_of = store.books ? kernels.vq->part : kernels.part;
    const Span span = slots_of(store, spec, step, position);
    const int size = part_slots(spec), parts = parts_of(span, size), shared_heads = step.heads / step.kv_heads, dim = step.dim;
    const int newest = engine.cache_->slot(step.store, sequence, position), base = span.first / size;

    float* queries = scratch.query.as<float>();
    std::memcpy(queries, buffer(step.src) + (size_t)row * width(step.src) + (size_t)head * shared_heads * dim,
                (size_t)shared_heads * dim * 4);
    for (int i = 0; i < shared_heads; i++) turn(step, queries + i * dim, row, step.q_norm);

    // Results of parts: [parts][shared_heads] × (dim values, largest score, total).
    const int record = dim + 2;
    float* results;
    if (split) {
        const int most_parts = (engine.cache_->length() + PART - 1) / PART + 2;
        results = engine.parts_.as<float>() + ((size_t)row * step.kv_heads + head) * most_parts * shared_heads * record;
    } else {
        scratch.out.reserve((size_t)parts * shared_heads * record * 4);
        results = scratch.out.as<float>();
    }
    Visible seen{engine.cache_->positions(step.store, sequence), 0, 0, position, step.window, spec.keep, spec.sinks};
    for (int part = first_part; part < last_part; part++) {
        int from = (base + part) * size, to = from + size;
        seen.first = from > span.first ? from : span.first, seen.last = to < span.last ? to : span.last;
        if (keeps && newest >= seen.first && newest < seen.last) keep(step, row, head);
        for (int i = 0; i < shared_heads; i += MAX_GROUP) {
            int count = shared_heads - i < MAX_GROUP ? shared_heads - i : MAX_GROUP;
            float most[MAX_GROUP], total[MAX_GROUP];
            float* out = results + ((size_t)part * shared_heads + i) * record;
            part_of(store, look.head, queries + i * dim, dim, count, step.scale, step.bound, seen, out, record, most, total,
                    scratch.attention.as<void>());
            for (int j = 0; j < count; j++) out[j * record + dim] = most[j], out[j * record + dim + 1] = total[j];
        }
    }
    if (split) {
        std::atomic<int>& done = engine.done_[(size_t)row * step.kv_heads + head];
        int mine = last_part - first_part;
        if (done.fetch_add(mine, std::memory_order_acq_rel) + mine < parts) return;
        done.store(0, std::memory_order_relaxed);
    }
    float* out = buffer(step.to) + (size_t)row * width(step.to) + (size_t)head * shared_heads * dim;
    for (int i = 0; i < shared_heads; i++) {
        float most = -INFINITY, total = 0;
        for (int part = 0; part < parts; part++) {
            float here = results[((size_t)part * shared_heads + i) * record + dim];
            most = here > most ? here : most;
        }
        std::memset(out + i * dim, 0, (size_t)dim * 4);
        for (int part = 0; part < parts; part++) {
            const float* result = results + ((size_t)part * shared_heads + i) * record;
            if (!(result[dim + 1] > 0)) continue;  // nothing was visible
            float factor = std::exp(result[dim] - most);
            total += result[dim + 1] * factor;
            engine.vector_->add_scaled(out + i * dim, result, factor, dim);
        }
        engine.vector_->scale(out + i * dim, total != 0 ? 1 / total : 0, dim);
    }
}

void Walk::attend_runs(const Step& step) {
    const StoreSpec& spec = engine.plan_.stores[step.store];
    for (int row = from(rows()); row < upto(rows()); row++)
        for (int head = 0; head < step.kv_heads; head++) keep(step, row, head);
    // Blocks round more than single rows do, so tokens that are no prompt never go that way: several of them at once give what
    // one after another would have given.
    const bool by_blocks = prompt && (spec.books || (engine.attention_->many && spec.codec != Codec::F32));
    const auto many = spec.books ? engine.attention_->vq->many : engine.attention_->many;
    const int shared_heads = step.heads / step.kv_heads, dim = step.dim, ldq = width(step.src), ldo = width(step.to);
    if (by_blocks)
        for (int row = from(rows()); row < upto(rows()); row++)
            for (int head = 0; head < step.heads; head++) turn(step, buffer(step.src) + (size_t)row * ldq + head * dim, row, step.q_norm);
    if (thread == 0) engine.next_task_.store(0, std::memory_order_relaxed);
    barrier();
    if (engine.watch_.best) watch(step, by_blocks);
    if (!by_blocks) {
        attend_alone(step, rows() <= SMALL, false);
        return;
    }
    // Long contexts first would balance better; blocks are small enough that it does not matter.
    const int block = spec.codec == Codec::INT8 ? LONG_QUERY_BLOCK : QUERY_BLOCK;
    for (;;) {
        int task = engine.next_task_.fetch_add(1, std::memory_order_relaxed);
        const RowRun* run = engine.runs_.data();
        const RowRun* end = run + engine.runs_.size();
        for (; run < end; run++) {
            int tasks = (run->count + block - 1) / block * step.kv_heads;
            if (task < tasks) break;
            task -= tasks;
        }
        if (run == end) return;
        const int head = task % step.kv_heads, offset = task / step.kv_heads * block;
        const int row = run->first + offset, count = run->count - offset < block ? run->count - offset : block;
        const int sequence = engine.rows_.sequences[row];
        const Cache::Look look = engine.cache_->look(step.store, sequence, head);
        const Store& store = look.store;
        const int position = engine.rows_.positions[row] - look.base;
        Span span = slots_of(store, spec, step, position);
        Span last = slots_of(store, spec, step, position + count - 1);
        Visible seen{engine.cache_->positions(step.store, sequence), span.first, last.last, position, step.window, spec.keep, spec.sinks};
        for (int i = 0; i < shared_heads; i += MAX_GROUP) {
            int group = shared_heads - i < MAX_GROUP ? shared_heads - i : MAX_GROUP;
            size_t at = ((size_t)head * shared_heads + i) * dim;
            many(store, look.head, buffer(step.src) + (size_t)row * ldq + at, ldq, group, count, step.scale, step.bound, seen,
                 buffer(step.to) + (size_t)row * ldo + at, ldo, scratch.attention.as<void>());
        }
    }
}

}  // namespace orchard
