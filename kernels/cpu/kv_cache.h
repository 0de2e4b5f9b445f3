// What a KV cache holds for a token and KV head: a key and a value, of head_dim = D elements each.
//
// Elements of float, bf16 or int8_t lie in words of P = PER_WORD of them (see vectors.h), so that vectors are filled as
// they lie: the keys of a block and KV head as [D / P, block_size, P], their values as [block_size / P, D, P]. 8-bit
// floats and 4-bit integers lie in pairs: keys as pairs of neighbouring elements, [D / 2, block_size], values as pairs
// of elements i and i + D / 2, [block_size, D / 2].
//
// Where a number has 8 or 4 bits, each key has a float32 scale, and so has each value: [block_size] of a block and head.
// An element is scale * number; of 4 bits, scale * (number - zero), zero being the scale's own 4 lowest bits. A key or
// value that is not all finite has an infinite scale, or NaN, and is NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "calls.h"
#include "rounding.h"

namespace {

// 8-bit floats with 4 bits of exponent and 3 of mantissa (OCP's E4M3).
struct fp8_pair {
    uint8_t first, second;
};
// Integers of 4 bits, the first in the low half.
struct int4_pair {
    uint8_t both;
};

template <class S>
constexpr bool IN_PAIRS = std::is_same<S, fp8_pair>::value || std::is_same<S, int4_pair>::value;

// The largest number; 0: floats without a scale.
template <class S>
constexpr int LARGEST = 0;
template <>
constexpr int LARGEST<int8_t> = 127;
template <>
constexpr int LARGEST<fp8_pair> = 448;
template <>
constexpr int LARGEST<int4_pair> = 15;

// An E4M3's bits in a float's places are 2^120 times less, whether it is subnormal or not.
constexpr float FP8_IN_PLACE = 0x1p120f;

// W pairs, exactly.
struct Pairs {
    vec first, second;
};

inline Pairs load(const fp8_pair* p) {
    uvec both = load_wide(reinterpret_cast<const uint16_t*>(p));
    auto number = [](uvec low) { return bit_cast<vec>((low & 0x7f) << 20 | (low & 0x80) << 24) * FP8_IN_PLACE; };
    return {number(both), number(both >> 8)};
}

inline int zero_of(float scale) { return bit_cast<int32_t>(scale) & 15; }

// The nearest integer; of NaN zero.
inline int nearest(float x) { return x == x ? int(std::lrint(x)) : 0; }

// The scale with which x[n] is kept: what is largest becomes the largest number.
template <class S>
inline Scale small_scale(const float* x, int n) {
    if constexpr (!std::is_same<S, int4_pair>::value) return scale_of(x, n, LARGEST<S>);
    vec below{}, above{}, wrong{};  // magnitudes of the least and the largest, zero being among them
    for_each_vec(n, [&](int i, auto get, auto) {
        vec value = get(x + i);
        below = max(-value, below);
        above = max(value, above);
        wrong += value * 0.0f;  // NaN where one is not finite
    });
    float range = largest(above) + largest(below) + sum(wrong);
    float scale = (range < LEAST_MAGNITUDE ? LEAST_MAGNITUDE : range) / LARGEST<S>;
    int zero = nearest(largest(below) / scale);
    scale = bit_cast<float>((bit_cast<int32_t>(scale) & ~15) | zero);
    return {scale, 1.0f / scale};
}

// Keeps two elements of what has the scale.
inline void store_pair(int4_pair* p, float first, float second, const Scale& scale) {
    auto kept = [&](float x) { return std::clamp(nearest(x * scale.inverse) + zero_of(scale.value), 0, 15); };
    *p = {uint8_t(kept(first) | kept(second) << 4)};
}

inline void store_pair(fp8_pair* p, float first, float second, const Scale& scale) {
    auto kept = [&](float x) {
        constexpr float NORMAL = 0x1p-6f, LEAST = 0x1p-9f;  // numbers below the first are multiples of the second
        float number = x * scale.inverse;
        auto bits = bit_cast<uint32_t>(number == number ? number : 0.0f);
        uint32_t magnitude = bits & 0x7fffffff, even = magnitude >> 20 & 1;
        magnitude = std::abs(number) >= NORMAL ? (magnitude - (120 << 23) + 0x7ffff + even) >> 20
                                               : nearest(std::abs(number) / LEAST);
        return uint8_t(magnitude | bits >> 31 << 7);
    };
    *p = {kept(first), kept(second)};
}

// Calls body(pointer to S) with the type that a code of Python's names.
template <class Body>
void with_cache_type(int code, Body body) {
    switch (code) {
        case 0: return body(static_cast<float*>(nullptr));
        case 1: return body(static_cast<bf16*>(nullptr));
        case 2: return body(static_cast<int8_t*>(nullptr));
        case 3: return body(static_cast<fp8_pair*>(nullptr));
        default: return body(static_cast<int4_pair*>(nullptr));
    }
}

}  // namespace
