// Matrix products of a weight of 8- or 4-bit integers with a scale, and perhaps a minimum, for each group of neighbouring
// k's of an output column, and of activations that are rounded here to integers with a scale for each such group.
//
//   out = sum over groups of (sum over k of x_integer * w_integer) * w_scale * x_scale + (sum of x) * w_minimum, + bias
//
// The sum within a group is exact: the integers of activations are as large as int16 and a sum in int32 allow, which is
// int16's largest for all usual groups: they lose less than bf16 activations have lost before. Groups are summed in fp32
// in ascending order. So bits depend neither on blocking nor on threads, and as a row's integers and scales come from
// that row alone, its result is its own in any batch.
//
// k's go in pairs, which one instruction multiplies as int16 and adds. Panels hold int8, or 4-bit halves of bytes, which
// are widened on their way into registers; where many rows meet a panel, 4 bits are widened to 8 before.
#pragma once

#include <algorithm>
#include <limits>

#include "linear.h"
#include "rounding.h"

namespace {

// Two 4-bit integers, 0 to 15, the first in the low half.
struct nibbles {
    uint8_t pair;
};
template <>
constexpr int PER_WORD<nibbles> = 1;  // elements of the array that are a word

inline ivec load_words(const nibbles* p) {
    ivec wide;
#if defined(__AVX512F__)
    wide = (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    for (int i = 0; i < W; ++i) wide[i] = p[i].pair;
#endif
    return (wide | wide << 12) & 0x000f000f;
}

// P is int8_t or nibbles.
template <class T, class Out, class P>
struct LinearGrouped {
    const T* x;
    const P* panels;
    const float* scales;    // [n_panels, groups, COLUMNS]
    const float* minimums;  // the same; nullptr: all zero
    const T* bias;          // nullptr: none
    Out* out;
    int64_t rows;
    int n, k, group, threads;

    int groups() const { return k / group; }
    int group_words() const { return (group + 1) / 2; }
    int words() const { return groups() * group_words(); }  // of a column
    // Words of an interleaved row: a group's integers, its scale and its sum.
    int width() const { return groups() * (group_words() + 2); }
    int n_panels() const { return (n + COLUMNS - 1) / COLUMNS; }
    int largest() const {  // integer that an activation becomes
        constexpr int LARGEST_WEIGHT = std::is_same<P, nibbles>::value ? 15 : 128;
        return std::min<int>(std::numeric_limits<int16_t>::max(),
                             std::numeric_limits<int32_t>::max() / (LARGEST_WEIGHT * group));
    }
};

// Rows [first, first + count) of x side by side: for each group words [group_words, count] of two int16, the scales
// [count] and the sums [count].
template <class T, class Out, class P>
void interleave(const LinearGrouped<T, Out, P>& l, int64_t first, int count, int32_t* out) {
    const int words = l.group_words();
    for (int group = 0; group < l.groups(); ++group, out += (words + 2) * count) {
        for (int r = 0; r < count; ++r) {
            const T* x = l.x + (first + r) * l.k + size_t(group) * l.group;
            Scale scale = scale_of(x, l.group, l.largest());
            vec total{};
            for_each_vec(l.group, [&](int i, auto get, auto) {
                vec rounded = round_to_integers(get(x + i), scale.inverse);
                total += rounded - ROUND;
                hvec integers = __builtin_convertvector(bit_cast<uvec>(rounded), hvec);
                int32_t lanes[W / 2];
                std::memcpy(lanes, &integers, sizeof integers);
                for (int j = 0; j < std::min(W / 2, words - i / 2); ++j) out[(i / 2 + j) * count + r] = lanes[j];
            });
            out[words * count + r] = bit_cast<int32_t>(scale.value);
            out[(words + 1) * count + r] = bit_cast<int32_t>(sum(total) * scale.value);
        }
    }
}

// sums[r] += x[r] * panel over one group, for R interleaved rows; `fresh` sums are taken for zero.
template <int R, class P>
void add_group(const int32_t* x, const P* panel, int words, const float* scales, const float* minimums, bool fresh,
               float* sums) {
    ivec total[R][VECTORS] = {};
    for (int i = 0; i < words; ++i, x += R, panel += COLUMNS * PER_WORD<P>) {
        ivec row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) row[v] = load_words(panel + v * W * PER_WORD<P>);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            ivec value = splat_word(x + r);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) total[r][v] = dot<int8_t>(value, row[v], total[r][v]);
        }
    }
    auto* x_scales = reinterpret_cast<const float*>(x);
    const float* x_sums = x_scales + R;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
        vec scale = load(scales + v * W), minimum = minimums ? load(minimums + v * W) : vec{};
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float* to = sums + r * COLUMNS + v * W;
            vec product = __builtin_convertvector(total[r][v], vec) * scale;
            vec now = fma(product, splat(x_scales[r]), fresh ? vec{} : load(to));
            if (minimums) now = fma(minimum, splat(x_sums[r]), now);
            store(to, now);
        }
    }
}

// `add_group` for a number of rows that is known only now, 1 to ROWS.
template <int R = ROWS, class P>
void add_group_of_some(int rows, const int32_t* x, const P* panel, int words, const float* scales,
                       const float* minimums, bool fresh, float* sums) {
    if (rows == R) return add_group<R>(x, panel, words, scales, minimums, fresh, sums);
    if constexpr (R > 1) add_group_of_some<R - 1>(rows, x, panel, words, scales, minimums, fresh, sums);
}

// Some words of a panel in 8 bits.
inline void widen(const nibbles* panel, int words, int8_t* wide) {
    for (int i = 0; i < words * COLUMNS; ++i) {
        wide[2 * i] = panel[i].pair & 15;
        wide[2 * i + 1] = panel[i].pair >> 4;
    }
}

// Rows [first, first + rows), `x` holding them interleaved, against one panel.
template <class T, class Out, class P>
void multiply_panel(const LinearGrouped<T, Out, P>& l, int64_t first, int rows, int panel, const int32_t* x) {
    constexpr int MOST_WORDS = 512;  // of a group that is widened before
    alignas(64) float sums[STRIP * COLUMNS];
    const int words = l.group_words();
    for (int group = 0; group < l.groups(); ++group) {
        const P* block = l.panels + (size_t(panel) * l.words() + size_t(group) * words) * COLUMNS * PER_WORD<P>;
        size_t at = (size_t(panel) * l.groups() + group) * COLUMNS;
        const float* minimums = l.minimums ? l.minimums + at : nullptr;
        auto add = [&](const auto* block) {
            for (int row = 0; row < rows; row += ROWS) {
                int count = std::min(ROWS, rows - row);
                const int32_t* values = x + size_t(row) * l.width() + size_t(group) * (words + 2) * count;
                add_group_of_some(count, values, block, words, l.scales + at, minimums, group == 0,
                                  sums + row * COLUMNS);
            }
        };
        if constexpr (std::is_same<P, nibbles>::value) {
            if (rows > ROWS && words <= MOST_WORDS) {
                alignas(64) int8_t wide[MOST_WORDS * COLUMNS * 2];
                widen(block, words, wide);
                add(wide);
                continue;
            }
        }
        add(block);
    }
    store_products(l, first, rows, panel, sums);
}

}  // namespace
