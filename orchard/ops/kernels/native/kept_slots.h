// Single slots of a store with one head, read, turned to other positions and written again: for kept.cpp alone.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "engine.h"

namespace orchard {

void attention_put(const Store& store, int head, int slot, const float* k, const float* v);  // attention.cpp

namespace {

float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <class Element, class Convert>
void read_pairs(const Store& s, int slot, float* k, float* v, const Convert& key_of, const Convert& value_of) {
    const Element* key = (const Element*)s.k + (size_t)(slot / 16) * s.width * 16 + slot % 16 * 2;
    const Element* value = (const Element*)s.v + (size_t)(slot / 2) * s.width * 2 + slot % 2;
    for (int c = 0; k && c < s.dim; c++) k[c] = key_of(key[c / 2 * 32 + c % 2]);
    for (int c = 0; v && c < s.dim; c++) v[c] = value_of(value[c * 2]);
}

// One slot of the only head of a store, as attention_put of attention.cpp wrote it.
void read_slot(const Store& s, int slot, float* k, float* v) {
    if (s.codec == Codec::BF16) return read_pairs<uint16_t>(s, slot, k, v, from_bf16, from_bf16);
    if (s.codec == Codec::INT8) {
        struct Times {
            float scale;
            float operator()(int8_t code) const { return scale * (float)code; }
        };
        return read_pairs<int8_t>(s, slot, k, v, Times{s.k_scale[slot]}, Times{s.v_scale[slot]});
    }
    const float *key = (const float*)s.k + (size_t)(slot / 16) * s.width * 16 + slot % 16, *value = (const float*)s.v + (size_t)slot * s.width;
    for (int c = 0; k && c < s.dim; c++) k[c] = key[c * 16];
    if (v) std::memcpy(v, value, s.dim * sizeof(float));
}

// One slot of a store to another: its key as given, its value as it is. The scale of a key of 8 bits stays as long as it can, so that
// channels that have not changed are not rounded again; a scale by the largest pair of channels holds whatever turns may come.
void write_slot(const Store& from, int slot, const Store& to, int place, const float* k, const float* v, int half) {
    if (to.codec != Codec::INT8) return attention_put(to, 0, place, k, v);
    float scale = from.k_scale[slot], most = 0;
    for (int c = 0; c < to.dim; c++) most = std::fabs(k[c]) > most ? std::fabs(k[c]) : most;
    if (most > 127.4f * scale) {
        for (int i = 0; i < half; i++) {
            const float size = std::sqrt(k[i] * k[i] + k[i + half] * k[i + half]);
            most = size > most ? size : most;
        }
        scale = most / 127;
    }
    int8_t* key = (int8_t*)to.k + (size_t)(place / 16) * to.width * 16 + place % 16 * 2;
    for (int c = 0; c < to.dim; c++) {
        const long code = scale > 0 ? std::lrint(k[c] / scale) : 0;
        key[c / 2 * 32 + c % 2] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
    }
    to.k_scale[place] = scale;
    const int8_t* value = (const int8_t*)from.v + (size_t)(slot / 2) * from.width * 2 + slot % 2;
    int8_t* target = (int8_t*)to.v + (size_t)(place / 2) * to.width * 2 + place % 2;
    for (int c = 0; c < to.dim; c++) target[c * 2] = value[c * 2];
    to.v_scale[place] = from.v_scale[slot];
}

// Turns of keys by whole positions, each pair of channels in steps of its own (see kept.h).
class Turns {
  public:
    Turns(const RotarySpec* rotary, Codec codec) : rotary_(rotary) {
        const double least = codec == Codec::F32 ? 0 : 1.0 / 32;  // radians: some four steps of rounding
        for (int i = 0; rotary && i < rotary->half; i++) {
            const double frequency = std::fabs((double)rotary->frequencies[i]);
            steps_.push_back(frequency > 0 && least > frequency ? (int)std::fmin(std::ceil(least / frequency), 1 << 24) : 1);
        }
    }
    int half() const { return rotary_ ? rotary_->half : 0; }
    // A key that has moved so far in all is to have moved so far.
    void operator()(float* key, int moved, int now) {
        for (int i = 0; i < half(); i++) {
            const int by = rounded_to(now, steps_[i]) - rounded_to(moved, steps_[i]);
            if (by == 0) continue;
            const float *turn = table(by) + i, cosine = turn[0], sine = turn[half()];
            const float low = key[i], high = key[i + half()];
            key[i] = low * cosine - high * sine;
            key[i + half()] = high * cosine + low * sine;
        }
    }

  private:
    static int rounded_to(int moved, int step) {  // in steps, half away from zero
        return step == 1 ? moved : moved >= 0 ? (moved + step / 2) / step : -((step / 2 - moved) / step);
    }
    // Cosines and sines of all pairs for so many of their steps, made when they are first asked for.
    const float* table(int by) {
        const size_t place = by > 0 ? 2 * (size_t)by - 1 : 2 * (size_t)-by;
        if (place >= tables_.size()) tables_.resize(place + 1);
        std::vector<float>& found = tables_[place];
        if (!found.empty()) return found.data();
        found.resize(2 * half());
        for (int i = 0; i < half(); i++) {
            const double angle = (double)by * steps_[i] * rotary_->frequencies[i];
            found[i] = (float)std::cos(angle), found[half() + i] = (float)std::sin(angle);
        }
        return found.data();
    }

    const RotarySpec* rotary_;
    std::vector<int> steps_;
    std::vector<std::vector<float>> tables_;
};

}  // namespace
}  // namespace orchard
