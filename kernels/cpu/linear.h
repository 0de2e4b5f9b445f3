// Matrix products of packed activations with a packed weight.
//
// A weight [n, k] is stored in *panels* of COLUMNS output columns, [n / COLUMNS, k, COLUMNS], padded with zeros; what
// is multiplied at once is ROWS rows of activations with one panel, their ROWS * COLUMNS sums staying in registers.
// Every output is one chain of fused multiply-adds over k in ascending order, whatever the number of rows: blocks of
// DEPTH only decide when the sums are set aside. (Goto and van de Geijn 2008.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "calls.h"
#include "vectors.h"

namespace {

constexpr int COLUMNS = 2 * W, ROWS = REGISTERS == 32 ? 12 : 6;
constexpr int DEPTH = 512;  // k's whose panel is worked through while it stays in the first-level cache
constexpr int STRIP = 192;  // rows that meet a panel while it stays in the second-level cache
static_assert(STRIP % ROWS == 0, "");

template <class T, class Out, class P = T>
struct Linear {
    const T* x;
    const P* panels;
    const T* bias;  // nullptr: none
    Out* out;
    int64_t rows;
    int n, k, threads;

    int width() const { return k; }  // words of an interleaved row
    int n_panels() const { return (n + COLUMNS - 1) / COLUMNS; }
    int64_t n_strips() const { return (rows + STRIP - 1) / STRIP; }
    int64_t strip_rows(int64_t strip) const { return std::min<int64_t>(STRIP, rows - strip * STRIP); }
};

// Lays a weight [n, k] out in panels.
template <class T>
void pack(const T* weight, T* panels, int n, int k, int threads) {
    constexpr int BLOCK = 16;  // k's of a column that are copied at once: a cache line
    int count = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads) if (int64_t(n) * k > THREADS_WORTH_IT)
    for (int panel = 0; panel < count; ++panel) {
        T* out = panels + size_t(panel) * k * COLUMNS;
        int columns = std::min(COLUMNS, n - panel * COLUMNS);
        if (columns < COLUMNS) std::fill_n(out, size_t(k) * COLUMNS, T{});
        for (int from = 0; from < k; from += BLOCK)
            for (int column = 0; column < columns; ++column) {
                const T* row = weight + (size_t(panel) * COLUMNS + column) * k;
                for (int i = from; i < std::min(from + BLOCK, k); ++i) out[size_t(i) * COLUMNS + column] = row[i];
            }
    }
}

// Rows [first, first + count) of x side by side as [k, count], so that a panel meets them in the order of memory.
template <class T, class Out>
void interleave(const Linear<T, Out>& l, int64_t first, int count, float* out) {
    const T* x = l.x + first * l.k;
    int i = 0;
    for (; i + W <= l.k; i += W) {
        float lanes[ROWS][W];
        for (int r = 0; r < count; ++r) store(lanes[r], load(x + size_t(r) * l.k + i));
        for (int j = 0; j < W; ++j, out += count)
            for (int r = 0; r < count; ++r) out[r] = lanes[r][j];
    }
    for (; i < l.k; ++i, out += count)
        for (int r = 0; r < count; ++r) out[r] = load_some(x + size_t(r) * l.k + i, 1)[0];
}

// sums[r] += x[r] * panel over `depth` k's, for R interleaved rows.
template <int R, class P>
void multiply(const float* x, const P* panel, int depth, float* sums) {
    vec total[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        total[r][0] = load(sums + r * COLUMNS);
        total[r][1] = load(sums + r * COLUMNS + W);
    }
    for (int d = 0; d < depth; ++d, x += R, panel += COLUMNS) {
        vec left = load(panel), right = load(panel + W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            vec value = splat(x[r]);
            total[r][0] = fma(value, left, total[r][0]);
            total[r][1] = fma(value, right, total[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        store(sums + r * COLUMNS, total[r][0]);
        store(sums + r * COLUMNS + W, total[r][1]);
    }
}

// `multiply` for a number of rows that is known only now, 1 to ROWS.
template <class P, int R = ROWS>
void multiply_some(int rows, const float* x, const P* panel, int depth, float* sums) {
    if (rows == R) return multiply<R>(x, panel, depth, sums);
    if constexpr (R > 1) multiply_some<P, R - 1>(rows, x, panel, depth, sums);
}

// One strip's rows, `x` holding them interleaved, against one panel.
template <class T, class Out>
void multiply_panel(const Linear<T, Out>& l, int64_t strip, int panel, const float* x) {
    alignas(64) float sums[STRIP * COLUMNS];
    alignas(64) float wide[std::is_same<T, float>::value ? 1 : DEPTH * COLUMNS];  // a block of the panel as fp32
    int rows = int(l.strip_rows(strip));
    std::fill_n(sums, rows * COLUMNS, 0.0f);
    for (int from = 0; from < l.k; from += DEPTH) {
        int depth = std::min(DEPTH, l.k - from);
        const T* block = l.panels + (size_t(panel) * l.k + from) * COLUMNS;
        bool widen = !std::is_same<T, float>::value && rows > ROWS;
        if (widen)
            for (int i = 0; i < depth * COLUMNS; i += W) store(wide + i, load(block + i));
        for (int row = 0; row < rows; row += ROWS) {
            int count = std::min(ROWS, rows - row);
            const float* values = x + size_t(row) * l.k + size_t(from) * count;
            if (widen)
                multiply_some(count, values, wide, depth, sums + row * COLUMNS);
            else
                multiply_some(count, values, block, depth, sums + row * COLUMNS);
        }
    }
    int column = panel * COLUMNS, columns = std::min(COLUMNS, l.n - column);
    for (int row = 0; row < rows; ++row)
        for_each_vec(columns, [&, from = sums + row * COLUMNS, to = l.out + (strip * STRIP + row) * l.n + column](
                                  int i, auto get, auto put) {
            put(to + i, l.bias ? get(from + i) + get(l.bias + column + i) : get(from + i));
        });
}

// Some rows, `x` being room for them.
template <class L>
void multiply_rows(const L& l, float* x) {
    constexpr int PANELS = 4;              // that a thread takes at a time
    constexpr int64_t WORTH_IT = 1 << 20;  // multiply-adds below which the other threads are not woken
    int64_t groups = (l.rows + ROWS - 1) / ROWS;
    int takes = (l.n_panels() + PANELS - 1) / PANELS;
#pragma omp parallel num_threads(l.threads) if (l.rows * l.n * l.k > WORTH_IT)
    {
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; ++group)
            interleave(l, group * ROWS, int(std::min<int64_t>(ROWS, l.rows - group * ROWS)),
                       x + group * ROWS * l.width());
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < l.n_strips() * takes; ++work) {
            int64_t strip = work / takes;
            int first = int(work % takes) * PANELS, end = std::min(first + PANELS, l.n_panels());
            const float* strip_x = x + strip * STRIP * l.width();
            for (int panel = first; panel < end; ++panel) multiply_panel(l, strip, panel, strip_x);
        }
    }
}

template <class L>
void linear(const L& l) {
    constexpr int64_t AT_ONCE = 4 * STRIP;  // bounds the working space
    float* x = scratch_floats(size_t(std::min(l.rows, AT_ONCE)) * l.width());
    for (int64_t first = 0; first < l.rows; first += AT_ONCE) {
        L some = l;
        some.x += first * l.k;
        some.out += first * l.n;
        some.rows = std::min(AT_ONCE, l.rows - first);
        multiply_rows(some, x);
    }
}

}  // namespace
