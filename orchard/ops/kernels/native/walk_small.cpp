// Steps without weights, or with very few.
#include "walk.h"

namespace orchard {

void Walk::normalise(const Step& step) {
    const int part = width(step.src) / step.groups;
    for (int row = from(rows()); row < upto(rows()); row++) {
        const float* src = buffer(step.src) + (size_t)row * width(step.src);
        float* to = buffer(step.to) + (size_t)row * width(step.to);
        for (int group = 0; group < step.groups; group++) {
            float* out = step.add ? scratch.x.as<float>() : to + group * part;
            engine.vector_->norm(src + group * part, step.norm.weight, step.norm.eps, part, out);
            if (step.add) engine.vector_->add(to + group * part, out, part);
        }
    }
}

void Walk::add(const Step& step) {
    const size_t total = (size_t)rows() * width(step.to);
    size_t first = total * thread / threads, last = total * (thread + 1) / threads;
    engine.vector_->add(buffer(step.to) + first, buffer(step.src) + first, (int)(last - first));
}

void Walk::clip(const Step& step) {
    const size_t total = (size_t)rows() * width(step.to);
    size_t first = total * thread / threads, last = total * (thread + 1) / threads;
    engine.vector_->clip(buffer(step.to) + first, step.bound, (int)(last - first));
}

void Walk::gate(const Step& step) {
    const size_t total = (size_t)rows() * width(step.to);
    size_t first = total * thread / threads, last = total * (thread + 1) / threads;
    engine.vector_->gate(buffer(step.src) + first, buffer(step.k) + first, (int)(last - first), step.activation, buffer(step.to) + first);
}

// Wanted rows are in ascending order, so each moves up or stays, and none is overwritten before it has moved.
void Walk::narrow(const Step& step) {
    if (engine.narrowed_) return;  // nobody writes it before the barrier below
    barrier();
    if (thread == 0) {
        const int count = engine.wanted_count_;
        for (int number : step.buffers) {
            const size_t bytes = (size_t)width(number) * 4;
            for (int i = 0; i < count; i++)
                if (engine.wanted_[i] != i)
                    std::memcpy((uint8_t*)buffer(number) + i * bytes, (uint8_t*)buffer(number) + engine.wanted_[i] * bytes, bytes);
        }
        for (size_t number = 0; number < engine.plan_.rotaries.size(); number++) {
            const int half = engine.plan_.rotaries[number].half;
            for (Block* table : {&engine.cosines_[number], &engine.sines_[number]})
                for (int i = 0; i < count; i++)
                    std::memmove(table->as<float>() + (size_t)i * half, table->as<float>() + (size_t)engine.wanted_[i] * half, (size_t)half * 4);
        }
        engine.narrow_sequences_.resize(count), engine.narrow_positions_.resize(count);
        for (int i = 0; i < count; i++) {
            engine.narrow_sequences_[i] = engine.rows_.sequences[engine.wanted_[i]];
            engine.narrow_positions_[i] = engine.rows_.positions[engine.wanted_[i]];
        }
        engine.rows_ = {count, engine.narrow_sequences_.data(), engine.narrow_positions_.data()};
        engine.narrowed_ = true;
        engine.find_runs();
    }
}

}  // namespace orchard
