// e^x as a plain function that compilers turn into vector instructions inside loops.
#pragma once
#include <cstdint>
#include <cstring>

namespace orchard {
namespace {  // each file that includes this gets a copy compiled for its own instruction set

// Relative error below 1e-6 for -87 < x < 88; bounded outside.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float turns = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    float whole = turns - 12582912.0f;
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    int32_t power = ((int32_t)whole + 127) << 23;
    float factor;
    std::memcpy(&factor, &power, 4);
    return sum * factor;
}

}  // namespace
}  // namespace orchard
