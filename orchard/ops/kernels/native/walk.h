// One thread's walk through the steps of a call.
#pragma once
#include "engine.h"

namespace orchard {

constexpr size_t PANEL_BYTES = 400000;  // of weights at a time, so that they stay in the second-level cache

// Rows of a run that one task attends for. A store of 8 bits is unpacked by every task: longer ones then.
constexpr int QUERY_BLOCK = 64, LONG_QUERY_BLOCK = 128;

constexpr size_t WARM_BYTES = 4096;     // of the next step's weights are asked for ahead of a barrier

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// The input of matrices, in whatever form their kernels want it.
struct Input {
    int rows = 0, cols = 0;
    const float* x = nullptr;  // [rows][ldx], normalised
    int ldx = 0;
    const void* packed = nullptr;  // for matrix units; then x may be null
    QuantRows quant{};
    int quant_group = 0;  // what `quant` holds now
    bool alone = false;   // prepared by this thread for itself
};

// The block, counted through all of a step's matrices, at which so many of all threads' equal shares of their bytes end.
int block_at(const std::vector<OutputRef>& outputs, int thread, int threads);

struct Walk {
    Engine& engine;
    const int thread, threads;
    Engine::Scratch& scratch;
    bool prompt;  // these rows go the way of many rows, however few they are

    Walk(Engine& owner, int number, int count)
        : engine(owner), thread(number), threads(count), scratch(owner.scratch_[number]), prompt(owner.prompt_) {}

    void all();
    void part();
    void warm(const Step& step) const;
    void barrier() { engine.pool_.barrier(); }
    int rows() const { return engine.rows_.count; }
    float* buffer(int number) const { return engine.buffer(number); }
    int width(int number) const { return engine.plan_.widths[number]; }
    // This thread's share of `count` things.
    int from(int count) const { return (int)((long)count * thread / threads); }
    int upto(int count) const { return (int)((long)count * (thread + 1) / threads); }

    // walk_linear.cpp
    void tables();
    void embed(const Step& step);
    void linear(const Step& step);
    void gated(const Step& step);
    void head(const Step& step);
    Input prepare(const float* src, int ldx, const NormRef& norm, const std::vector<OutputRef>& outputs, int count,
                  const int32_t* chosen_rows);
    void multiply(const OutputRef& output, Input& input, int first, int last, float* y, int ldy, bool add);
    void product(const Weight& weight, Input& input, int first, int last, float* y, int ldy, bool add);
    template <class Some>
    void share(int blocks, const Input& input, int fewest, const Some& some);
    void quantise(const float* x, int cols, int padded, int group, const QuantRows& to) const;
    void need_quant(Input& input, const Weight& weight);

    // walk_attend.cpp
    void attend(const Step& step);
    void turn(const Step& step, float* x, int row, const NormRef& norm) const;
    void keep(const Step& step, int row, int head);
    void attend_alone(const Step& step, bool split, bool keeps);
    void attend_row(const Step& step, int row, int head, int first_part, int last_part, bool split, bool keeps);
    void attend_runs(const Step& step);

    // walk_watch.cpp
    void watch(const Step& step, bool turned);

    // walk_experts.cpp
    void experts(const Step& step);
    void route(const Step& step);
    void compute(const Step& step, const int32_t* slots);
    void combine(const Step& step);

    // walk_small.cpp
    void normalise(const Step& step);
    void add(const Step& step);
    void clip(const Step& step);
    void gate(const Step& step);
    void narrow(const Step& step);
};

}  // namespace orchard
