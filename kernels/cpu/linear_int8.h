// Matrix products of an int8 weight with a scale for each output column, and of activations that are rounded here to
// integers with a scale for each row.
//
//   out = (sum over k of x_integer * w_integer) * x_scale * w_scale + bias
//
// The sum is exact: the integers of activations are as large as int16 and a sum in int32 allow, which is 127 at
// MAX_INT8_DEPTH and 13 bits or more below 2000. So its bits depend neither on blocking nor on threads, and as a row's
// integers and scale come from that row alone, its result is its own in any batch.
//
// k's go in pairs, which one instruction multiplies as int16 and adds, so that activations of 8 bits would be no
// faster: they would only be wrong by more, for the largest of a row is often far above the others. Panels hold int8,
// widened on its way into registers: what is widened before, in blocks or when it is packed, moves twice the bytes.
#pragma once

#include <algorithm>
#include <limits>

#include "linear.h"

namespace {

constexpr int LARGEST_INT8 = 127;
constexpr int MAX_INT8_DEPTH = std::numeric_limits<int32_t>::max() / (LARGEST_INT8 * LARGEST_INT8);
constexpr float LEAST_MAGNITUDE = 1e-30f;  // a row without a larger one is rounded as if it had it: no scale is zero

template <class T, class Out>
struct LinearInt8 : Linear<T, Out, int8_t> {
    using Sum = int32_t;

    const float* scales;  // [n]

    int width() const { return this->words() + 1; }
    int largest() const {  // integer that an activation becomes
        return std::min<int>(std::numeric_limits<int16_t>::max(),
                             std::numeric_limits<int32_t>::max() / (LARGEST_INT8 * this->k));
    }

    auto products(const int32_t* x, int row, int count) const {
        float scale = bit_cast<float>(x[size_t(this->words()) * count + row]);
        return [this, scale](const int32_t* sums, int column, auto get) {
            return __builtin_convertvector(load(sums), vec) * scale * get(scales + column);
        };
    }
};

// How a row is rounded: x ~ value * integer. One that is not all finite becomes zeros times infinity or NaN: NaN.
struct Scale {
    float value, inverse;
};

template <class T>
Scale scale_of(const T* x, int k, int largest) {
    ivec most{};  // magnitudes as integers, where NaN is above infinity
    for_each_vec(k, [&](int i, auto get, auto) {
        ivec bits = bit_cast<ivec>(get(x + i)) & 0x7fffffff;
        most = bits > most ? bits : most;
    });
    int32_t bits = 0;
    for (int i = 0; i < W; ++i) bits = std::max(bits, most[i]);
    float magnitude = bit_cast<float>(bits);
    float value = (magnitude < LEAST_MAGNITUDE ? LEAST_MAGNITUDE : magnitude) / float(largest);
    return {value, 1.0f / value};
}

// x * inverse as int16, to nearest even; NaN becomes zero, so that no sum overflows.
inline hvec round_to_integers(vec x, float inverse) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has the integer in its low bits
    vec scaled = x * inverse;
    scaled = scaled == scaled ? scaled : vec{};
    return __builtin_convertvector(bit_cast<uvec>(scaled + ROUND), hvec);
}

// Rows [first, first + count) of x side by side as words [words, count] of two int16, then their scales [count].
template <class T, class Out>
void interleave(const LinearInt8<T, Out>& l, int64_t first, int count, int32_t* out) {
    const T* x = l.x + first * l.k;
    float inverse[ROWS];
    for (int r = 0; r < count; ++r) {
        Scale scale = scale_of(x + size_t(r) * l.k, l.k, l.largest());
        inverse[r] = scale.inverse;
        out[size_t(l.words()) * count + r] = bit_cast<int32_t>(scale.value);
    }
    for_each_vec(l.k, [&](int i, auto get, auto) {
        int32_t lanes[ROWS][W / 2];
        for (int r = 0; r < count; ++r) {
            hvec integers = round_to_integers(get(x + size_t(r) * l.k + i), inverse[r]);
            std::memcpy(lanes[r], &integers, sizeof integers);
        }
        int words = std::min(W / 2, l.words() - i / 2);
        for (int j = 0; j < words; ++j, out += count)
            for (int r = 0; r < count; ++r) out[r] = lanes[r][j];
    });
}

}  // namespace
