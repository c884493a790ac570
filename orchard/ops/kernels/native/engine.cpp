#include "engine.h"

#include <chrono>
#include <new>

#include "walk.h"

namespace orchard {
namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Engine::Engine(Plan plan, int threads, int level)
    : plan_(std::move(plan)),
      pool_(threads),
      linear_(linear_kernels(level)),
      matrix_(matrix_kernels(level)),
      attention_(attention_kernels(level)),
      vector_(vector_kernels(level)),
      watching_(watch_kernels(level)),
      buffers_(plan_.widths.size()),
      cosines_(plan_.rotaries.size()),
      sines_(plan_.rotaries.size()),
      scratch_(pool_.size()) {}

void Crowd::saw(int threads, int sleeps, double seconds) {
    if (left_ > 0) {
        follow(alone_, seconds);
        if (--left_ == 0) together_ = alone_ * 0.9;  // the benefit of the doubt, but not much of it
    } else if (threads > 1) {
        follow(together_, seconds);
        best_ = best_ > 0 && best_ * 1.001 < seconds ? best_ * 1.001 : seconds;  // contexts grow, and steps with them
        if (sleeps < MANY_SLEEPS) {
            if (++calm_ >= SHORTEST) pause_ = SHORTEST;
        } else if (alone_ == 0) {
            if (together_ > 1.4 * best_) left_ = TRIAL;  // this is no passing trouble: how fast is one thread by itself?
        } else if (together_ > alone_) {
            left_ = pause_;
            pause_ = pause_ * 2 < LONGEST ? pause_ * 2 : LONGEST;
            calm_ = 0;
        }
    }
}

// Memory for calls of up to this many rows.
void Engine::reserve(int rows) {
    if (rows <= reserved_) return;
    rows = rows <= SMALL ? SMALL : round_up(rows, 32);
    const size_t widest = round_up(plan_.widest, 64);
    for (size_t number = 0; number < buffers_.size(); number++) buffers_[number].reserve((size_t)rows * plan_.widths[number] * 4);
    for (size_t number = 0; number < plan_.rotaries.size(); number++) {
        cosines_[number].reserve((size_t)rows * plan_.rotaries[number].half * 4);
        sines_[number].reserve((size_t)rows * plan_.rotaries[number].half * 4);
    }
    const size_t plain_row = widest * 6 + widest / 32 * 8;  // float32, two digits, scales and sums
    size_t shared = rows * plain_row;
    if (matrix_ && matrix_->packed_bytes(rows, (int)widest) > shared) shared = matrix_->packed_bytes(rows, (int)widest);
    shared_.reserve(shared);
    size_t most_heads = 0, most_query = 0, expert = 0;
    for (const Step& step : plan_.steps) {
        if (step.kind == StepKind::Attend) {
            if ((size_t)step.kv_heads > most_heads) most_heads = step.kv_heads;
            size_t query = (size_t)step.heads / step.kv_heads * step.dim * 4;
            if (query > most_query) most_query = query;
        }
        if (step.kind == StepKind::Experts) {
            size_t pairs = (size_t)rows * step.chosen;
            size_t floats = 2 * pairs + (size_t)rows * (step.outputs[1].weight.cols + step.experts) +
                            pairs * (step.outputs[1].weight.rows + step.outputs[1].weight.cols);
            if (floats * 4 > expert) expert = floats * 4;
        }
    }
    expert_.reserve(expert);
    for (Scratch& scratch : scratch_) {
        scratch.x.reserve((size_t)32 * widest * 4);
        scratch.quant.reserve((size_t)SMALL * (2 * widest + 8 * (widest / 32)));
        scratch.query.reserve(most_query + 64);
    }
    if (done_.size() < SMALL * most_heads) done_ = std::vector<std::atomic<int>>(SMALL * most_heads);
    reserved_ = rows;
}

void Engine::find_runs() {
    runs_.clear();
    long_runs_ = false;
    for (int row = 0; row < rows_.count; row++) {
        bool follows = row > 0 && rows_.sequences[row] == rows_.sequences[row - 1] && rows_.positions[row] == rows_.positions[row - 1] + 1;
        if (follows)
            runs_.back().count++, long_runs_ = true;
        else
            runs_.push_back({row, 1});
    }
}

Engine::Problem Engine::run(Cache& cache, int first, int last, bool prompt, int count, const int32_t* tokens, const int32_t* sequences,
                            const int32_t* positions, int wanted_count, const int32_t* wanted, float* scores, Watch watch) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int row = 0; row < count; row++) {
        if (tokens[row] < 0 || tokens[row] >= plan_.vocab) return BAD_TOKEN;
        if (sequences[row] < 0 || sequences[row] >= cache.sequences() || !cache.alive(sequences[row])) return BAD_SEQUENCE;
        if (positions[row] < 0 || positions[row] >= cache.length(sequences[row])) return BAD_POSITION;
    }
    for (int i = 0; i < wanted_count; i++)
        if (wanted[i] < (i ? wanted[i - 1] + 1 : 0) || wanted[i] >= count) return BAD_POSITION;
    try {
        int largest = sequences[0];  // the one with the most slots
        for (int row = 0; row < count; row++) {
            cache.reserve(sequences[row], positions[row] + 1);
            if (cache.capacity(sequences[row]) > cache.capacity(largest)) largest = sequences[row];
        }
        reserve(prompt && count < 32 ? 32 : count);
        reserve_kept(cache, count, sequences, watch);
        for (Scratch& scratch : scratch_)
            for (const Step& step : plan_.steps)
                if (step.kind == StepKind::Attend) {
                    Store store = cache.view(step.store, largest);
                    int shared_heads = step.heads / step.kv_heads, group = shared_heads < MAX_GROUP ? shared_heads : MAX_GROUP;
                    if (store.books) {
                        scratch.attention.reserve(attention_->vq->scratch_bytes(store, VQ_PART, group));
                        if (prompt) scratch.attention.reserve(attention_->vq->many_scratch_bytes(store, group, QUERY_BLOCK));
                    } else {
                        scratch.attention.reserve(attention_->scratch_bytes(store, PART, group));
                    }
                    if (attention_->many && !store.books) scratch.attention.reserve(attention_->many_scratch_bytes(store, group));
                    if (thread_parts(step, cache) > parts_.bytes()) parts_.reserve(thread_parts(step, cache));
                }
        tokens_ = tokens, wanted_count_ = wanted_count, wanted_ = wanted, scores_ = scores, cache_ = &cache;
        first_ = first, last_ = last, prompt_ = prompt, watch_ = watch;
        if (first == 0) {
            narrowed_ = false;
            rows_ = {count, sequences, positions};
            find_runs();
            for (size_t store = 0; store < plan_.stores.size(); store++)
                for (int row = 0; row < count; row++)
                    if (int32_t* table = cache.positions((int)store, sequences[row])) table[cache.slot((int)store, sequences[row], positions[row])] = positions[row];
        } else if (!narrowed_) {
            rows_ = {count, sequences, positions};
        }
        if (count <= SMALL) {
            if (first == 0) pass_ = {crowd_.threads(pool_.size()), 0, 0};
            const int threads = pass_.threads;
            in_pass(work);
            if (last == (int)plan_.steps.size()) crowd_.saw(threads, pass_.sleeps, pass_.seconds / count);
            seconds.calls += timed, seconds.alone += timed && threads < pool_.size();
        } else {
            pool_.run(work, this, pool_.size());
        }
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return OK;
}

// Room for the attention parts of a call of few rows.
size_t Engine::thread_parts(const Step& step, const Cache& cache) const {
    size_t parts = (cache.length() + PART - 1) / PART + 2;
    return (size_t)SMALL * step.heads * parts * (step.dim + 2) * 4;
}

void Engine::work(void* engine, int thread, int threads) { Walk(*static_cast<Engine*>(engine), thread, threads).all(); }

// Asks for the first weights this thread will read in a step, while it waits for the others to finish the one before.
void Walk::warm(const Step& step) const {
    if (rows() > SMALL || prompt || (step.kind != StepKind::Linear && step.kind != StepKind::Gated && step.kind != StepKind::Head)) return;
    const bool pairs = step.kind == StepKind::Gated;  // gate and up are cut alike
    int first = pairs ? from(step.outputs[0].weight.blocks()) : block_at(step.outputs, thread, threads);
    for (const OutputRef& output : step.outputs) {
        if (first >= output.weight.blocks()) {
            first -= output.weight.blocks();
            continue;
        }
        const size_t start = first * output.weight.block_bytes(), bytes = output.weight.bytes() - start;
        for (size_t at = 0; at < WARM_BYTES && at < bytes; at += 64) __builtin_prefetch(output.weight.data + start + at);
        return;
    }
}

void Engine::part(int step, Part part, const int32_t* slots) {
    std::lock_guard<std::mutex> hold(mutex_);
    first_ = step, part_ = part, slots_ = slots;
    if (rows_.count > SMALL)
        pool_.run(part_work, this, pool_.size());
    else if (part == Part::Compute)
        in_pass(part_work);
    else
        pool_.run(part_work, this, 1);  // too little to wake anybody for
}

// A piece of a call of few rows: all of them together are a call's time.
void Engine::in_pass(Pool::Work work) {
    const double started = seconds_now();
    pool_.run(work, this, pass_.threads);
    pass_.seconds += seconds_now() - started;
    pass_.sleeps += pool_.sleeps();
}

void Engine::part_work(void* engine, int thread, int threads) { Walk(*static_cast<Engine*>(engine), thread, threads).part(); }

void Walk::part() {
    const Step& step = engine.plan_.steps[engine.first_];
    switch (engine.part_) {
        case Engine::Part::Route: route(step); break;
        case Engine::Part::Compute: compute(step, engine.slots_); break;
        case Engine::Part::Combine: combine(step); break;
    }
}

void Walk::all() {
    if (engine.first_ == 0) tables();
    for (int number = 0; number < engine.first_; number++)
        if (engine.plan_.steps[number].kind == StepKind::Narrow) prompt = false;  // in an earlier call
    for (int number = engine.first_; number < engine.last_; number++) {
        const Step& step = engine.plan_.steps[number];
        if (step.kind == StepKind::Narrow) prompt = false;  // what is left gives scores, and is kept nowhere
        if (step.kind == StepKind::Narrow && engine.wanted_count_ == rows()) continue;  // all rows are wanted
        double started = engine.timed && thread == 0 ? seconds_now() : 0;
        switch (step.kind) {
            case StepKind::Embed: embed(step); break;
            case StepKind::Linear: linear(step); break;
            case StepKind::Gated: gated(step); break;
            case StepKind::Attend: attend(step); break;
            case StepKind::Normalise: normalise(step); break;
            case StepKind::Add: add(step); break;
            case StepKind::Clip: clip(step); break;
            case StepKind::Experts: experts(step); break;
            case StepKind::Narrow: narrow(step); break;
            case StepKind::Head: head(step); break;
            case StepKind::Gate: gate(step); break;
            case StepKind::Torch: break;  // the caller runs these between calls
        }
        if (number + 1 < engine.last_) warm(engine.plan_.steps[number + 1]);
        barrier();
        if (engine.timed && thread == 0) engine.seconds.total[(int)step.kind] += seconds_now() - started;
    }
}

}  // namespace orchard
