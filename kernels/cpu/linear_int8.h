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
// faster: they would only be wrong by more, for the largest of a row is often far above the others. Panels hold int8:
// [n / COLUMNS, pairs, COLUMNS, 2], an odd k padded with zero. They are widened on their way into registers, for what is
// widened before, in blocks or when it is packed, moves twice the bytes.
#pragma once

#include <algorithm>
#include <limits>

#include "linear.h"

namespace {

constexpr int LARGEST_INT8 = 127;
constexpr int MAX_INT8_DEPTH = std::numeric_limits<int32_t>::max() / (LARGEST_INT8 * LARGEST_INT8);
constexpr int PAIRS = 512;                 // that are worked through while their panel stays in the first-level cache
constexpr float LEAST_MAGNITUDE = 1e-30f;  // a row without a larger one is rounded as if it had it: no scale is zero

template <class T, class Out>
struct LinearInt8 : Linear<T, Out, int8_t> {
    const float* scales;  // [n]

    int pairs() const { return (this->k + 1) / 2; }
    int width() const { return pairs() + 1; }
    int largest() const {  // integer that an activation becomes
        return std::min<int>(std::numeric_limits<int16_t>::max(),
                             std::numeric_limits<int32_t>::max() / (LARGEST_INT8 * this->k));
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

// Rows [first, first + count) of x side by side as [pairs, count] words of two int16, then their scales [count].
template <class T, class Out>
void interleave(const LinearInt8<T, Out>& l, int64_t first, int count, float* out) {
    const T* x = l.x + first * l.k;
    int32_t* words = reinterpret_cast<int32_t*>(out);
    float inverse[ROWS];
    for (int r = 0; r < count; ++r) {
        Scale scale = scale_of(x + size_t(r) * l.k, l.k, l.largest());
        inverse[r] = scale.inverse;
        out[size_t(l.pairs()) * count + r] = scale.value;
    }
    for_each_vec(l.k, [&](int i, auto get, auto) {
        int32_t lanes[ROWS][W / 2];
        for (int r = 0; r < count; ++r) {
            hvec integers = round_to_integers(get(x + size_t(r) * l.k + i), inverse[r]);
            std::memcpy(lanes[r], &integers, sizeof integers);
        }
        int pairs = std::min(W / 2, l.pairs() - i / 2);
        for (int j = 0; j < pairs; ++j, words += count)
            for (int r = 0; r < count; ++r) words[r] = lanes[r][j];
    });
}

// sums[r] += x[r] * panel over some pairs, for R interleaved rows.
template <int R>
void multiply(const int32_t* x, const int8_t* panel, int pairs, int32_t* sums) {
    ivec total[R][2];
    std::memcpy(total, sums, sizeof total);
#pragma GCC unroll 2
    for (int p = 0; p < pairs; ++p, x += R, panel += 2 * COLUMNS) {
        ivec left = load_pairs(panel), right = load_pairs(panel + 2 * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            ivec value = x[r] - ivec{};
            total[r][0] = multiply_pairs(value, left, total[r][0]);
            total[r][1] = multiply_pairs(value, right, total[r][1]);
        }
    }
    std::memcpy(sums, total, sizeof total);
}

// `multiply` for a number of rows that is known only now, 1 to ROWS.
template <int R = ROWS>
void multiply_some(int rows, const int32_t* x, const int8_t* panel, int pairs, int32_t* sums) {
    if (rows == R) return multiply<R>(x, panel, pairs, sums);
    if constexpr (R > 1) multiply_some<R - 1>(rows, x, panel, pairs, sums);
}

// One strip's rows, `x` holding them interleaved, against one panel.
template <class T, class Out>
void multiply_panel(const LinearInt8<T, Out>& l, int64_t strip, int panel, const float* x) {
    alignas(64) int32_t sums[STRIP * COLUMNS];
    int rows = int(l.strip_rows(strip));
    std::fill_n(sums, rows * COLUMNS, 0);
    for (int from = 0; from < l.pairs(); from += PAIRS) {
        const int8_t* block = l.panels + (size_t(panel) * l.pairs() + from) * 2 * COLUMNS;
        for (int row = 0; row < rows; row += ROWS) {
            int count = std::min(ROWS, rows - row);
            const int32_t* words = reinterpret_cast<const int32_t*>(x) + size_t(row) * l.width() + size_t(from) * count;
            multiply_some(count, words, block, std::min(PAIRS, l.pairs() - from), sums + row * COLUMNS);
        }
    }
    int column = panel * COLUMNS, columns = std::min(COLUMNS, l.n - column);
    for (int row = 0; row < rows; ++row) {
        int group = row / ROWS * ROWS, count = std::min(ROWS, rows - group);
        float scale = x[size_t(group) * l.width() + size_t(l.pairs()) * count + (row - group)];
        for_each_vec(columns, [&, from = sums + row * COLUMNS, to = l.out + (strip * STRIP + row) * l.n + column](
                                  int i, auto get, auto put) {
            ivec sum;
            std::memcpy(&sum, from + i, sizeof sum);
            vec product = __builtin_convertvector(sum, vec) * scale * get(l.scales + column + i);
            put(to + i, l.bias ? product + get(l.bias + column + i) : product);
        });
    }
}

}  // namespace
