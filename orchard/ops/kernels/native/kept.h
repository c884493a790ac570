// A sequence under a budget of tokens: what stays of it after some were forgotten.
//
// Every head of every store keeps tokens of its own, in the order they came, numbered up to the same last position: a head with c of n
// tokens has positions n - c .. n - 1 in its slots 0 .. c - 1. To attention it is a sequence of n tokens whose first slots, where a head
// has forgotten more than another, are not there (`base`). Forgetting moves what stays to the front and turns keys by the difference
// of their positions, so that a conversation may be longer than the positions a model was trained for.
//
// Keys are turned often, a little each time, and rounded each time. A turn that is smaller than the rounding would be lost again and
// again, so a pair of channels waits until enough of them have come together: how far a key has moved in all is known (`moved`), and
// each pair is turned for it in whole steps that its rounding can hold. No pair is ever off by more than half of such a step.
//
// The memory of a store is fixed by its budget: heads × (budget + block) slots, and `scratch` more for rows that look and are not kept.
// Heads may share it as they need, as long as their sum fits. Other budgets, or more scratch, mean other memory, which is there beside the
// old for a moment.
#pragma once
#include <cstdint>
#include <vector>

#include "engine.h"

namespace orchard {

class Kept {
  public:
    // `budgets`: tokens by store, of every head on average; `block`: how many more there may be before some must go.
    Kept(const Plan& plan, const int32_t* budgets, int block, int scratch);

    Store view(int store, int head) const;  // of one head alone
    Store largest(int store) const;         // of as many slots as the longest head has: to measure scratch memory by
    int base(int store, int head) const { return areas_[store].heads[head].base; }
    int count(int store, int head) const { return tokens_ - base(store, head); }
    int tokens() const { return tokens_; }  // the position of the next one
    int limit() const;                      // positions below this have a slot
    int room() const;                       // tokens that may be kept before some must go
    size_t memory() const { return memory_.bytes(); }

    // The rows just run, at the next positions, stay: false, and nothing has changed, where that is more than the budget allows.
    bool keep(int tokens);
    // The newest tokens go again: false, and nothing has changed, where some head has fewer.
    bool back(int tokens);
    // counts [stores][heads] of slots stay, which `slots` names head after head, ascending. `budgets` and `scratch` hold from now on.
    void compact(const int32_t* counts, const int32_t* slots, const int32_t* budgets, int scratch, int threads);
    // Keys (rotated) and values of a head as float32 [count][dim]; either may be null.
    void read(int store, int head, float* k, float* v) const;

    // All that is kept as one run of bytes, for stores with so many tokens [stores][heads], and back again into an empty sequence.
    size_t bytes(const int32_t* counts) const;
    void take(uint8_t* to) const;
    void put(const int32_t* counts, const uint8_t* from);

  private:
    struct Head {
        size_t slot;  // where it begins among the store's slots
        int capacity, base;
    };
    struct Area {
        size_t k, v, k_scale, v_scale, moved, end;  // offsets in memory
        int budget, slots, width;
        std::vector<Head> heads;
    };
    std::vector<Area> arrange(const int32_t* budgets, int scratch, const int32_t* counts) const;
    Store view(const Area& area, const Head& head, const StoreSpec& spec, uint8_t* memory) const;
    int32_t* moved(const Area& area, const Head& head, uint8_t* memory) const;
    void move(int store, const Area& from, uint8_t* read, const Area& to, uint8_t* write, const int32_t* slots, int shift) const;
    template <class Visit> void pieces(const Visit& visit) const;

    const Plan& plan_;
    const int block_;
    int scratch_, tokens_ = 0;
    std::vector<const RotarySpec*> rotaries_;  // by store; null: keys are not rotated
    std::vector<Area> areas_;
    Block memory_;
};

}  // namespace orchard
