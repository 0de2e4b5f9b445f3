// How numbers are rounded to small ones.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr float LEAST_MAGNITUDE = 1e-30f;  // numbers without a larger one are rounded as if they had it

// How numbers are rounded: x ~ value * small number. Where not all are finite they become zeros times infinity or NaN:
// NaN.
struct Scale {
    float value, inverse;
};

// The scale of x[n] with which the largest magnitude becomes `largest`.
template <class T>
Scale scale_of(const T* x, int n, int largest) {
    ivec most{};  // magnitudes as integers, where NaN is above infinity
    for_each_vec(n, [&](int i, auto get, auto) {
        ivec bits = bit_cast<ivec>(get(x + i)) & 0x7fffffff;
        most = bits > most ? bits : most;
    });
    int32_t bits = 0;
    for (int i = 0; i < W; ++i) bits = std::max(bits, most[i]);
    float magnitude = bit_cast<float>(bits);
    float value = (magnitude < LEAST_MAGNITUDE ? LEAST_MAGNITUDE : magnitude) / float(largest);
    return {value, 1.0f / value};
}

// x * inverse + ROUND, whose low bits are the integer nearest to x * inverse, to even; NaN becomes zero.
inline vec round_to_integers(vec x, float inverse) {
    vec scaled = x * inverse;
    return (scaled == scaled ? scaled : vec{}) + ROUND;
}

}  // namespace
