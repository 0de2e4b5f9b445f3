// Matrix products of packed activations with a packed weight.
//
// Elements go in words of neighbouring k's (see vectors.h). A weight [n, k] is stored in *panels* of COLUMNS output
// columns, [n / COLUMNS, words, COLUMNS, PER_WORD], padded with zeros; what is multiplied at once is ROWS rows of
// activations with one panel, their ROWS * COLUMNS sums staying in registers. Every output is one chain of sums over k
// in ascending order, whatever the number of rows: blocks of a panel only decide when the sums are set aside. (Goto and
// van de Geijn 2008.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "calls.h"
#include "vectors.h"

namespace {

constexpr int VECTORS = REGISTERS == 32 ? 3 : 2, COLUMNS = VECTORS * W, ROWS = REGISTERS == 32 ? 8 : 6;
constexpr int DEPTH = W == 16 ? 1024 : 512;  // words of factors whose panel stays in a cache while rows meet it
constexpr int STRIP = 192;                   // rows that stay in the second-level cache while panels meet them
static_assert(STRIP % ROWS == 0, "");

// What the elements of a panel are multiplied as: bf16 as fp32 where no instruction multiplies it.
template <class P>
using Factor = std::conditional_t<std::is_same<P, bf16>::value && !MULTIPLIES_BF16, float, P>;

// Words of the factors that a word of the panel holds.
template <class P>
constexpr int FACTORS = PER_WORD<P> / PER_WORD<Factor<P>>;

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

template <class T, class Out>
struct Linear {
    const T *x, *panels;
    const T* bias;  // nullptr: none
    Out* out;
    int64_t rows;
    int n, k, threads;

    int words() const { return (k + PER_WORD<T> - 1) / PER_WORD<T>; }  // of a column
    int width() const { return words() * FACTORS<T>; }                 // words of an interleaved row
    int n_panels() const { return (n + COLUMNS - 1) / COLUMNS; }
};

// Lays a weight [n, words] out in panels.
template <class Word>
void pack(const Word* weight, Word* panels, int n, int words, int threads) {
    constexpr int BLOCK = 16;  // words of a column that are copied at once
    int count = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads) if (int64_t(n) * words > THREADS_WORTH_IT)
    for (int panel = 0; panel < count; ++panel) {
        Word* out = panels + size_t(panel) * words * COLUMNS;
        int columns = std::min(COLUMNS, n - panel * COLUMNS);
        if (columns < COLUMNS) std::fill_n(out, size_t(words) * COLUMNS, Word{});
        for (int from = 0; from < words; from += BLOCK)
            for (int column = 0; column < columns; ++column) {
                const Word* row = weight + (size_t(panel) * COLUMNS + column) * words;
                for (int i = from; i < std::min(from + BLOCK, words); ++i) out[size_t(i) * COLUMNS + column] = row[i];
            }
    }
}

// Rows [first, first + count) of x side by side as words [width, count], so that a panel meets them in the order of
// memory; an odd k is padded with zero.
template <class T, class Out>
void interleave(const Linear<T, Out>& l, int64_t first, int count, int32_t* out) {
    constexpr int RUN = W * PER_WORD<Factor<T>>;  // elements that are W words of factors
    const T* x = l.x + first * l.k;
    for (int i = 0; i < l.k; i += RUN) {
        T padded[ROWS][RUN];
        int32_t lanes[ROWS][W];
        int some = std::min(RUN, l.k - i), words = std::min(W, l.width() - i / PER_WORD<Factor<T>>);
        for (int r = 0; r < count; ++r) {
            const T* from = x + size_t(r) * l.k + i;
            if (some < RUN) {
                std::fill_n(padded[r], RUN, T{});
                std::memcpy(padded[r], from, some * sizeof(T));
                from = padded[r];
            }
            if constexpr (std::is_same<T, Factor<T>>::value)
                std::memcpy(lanes[r], from, sizeof lanes[r]);
            else
                store(reinterpret_cast<float*>(lanes[r]), load(from));
        }
        auto side_by_side = [&](auto count) {
            for (int j = 0; j < words; ++j, out += count)
                for (int r = 0; r < count; ++r) out[r] = lanes[r][j];
        };
        if (count == ROWS)
            side_by_side(std::integral_constant<int, ROWS>{});
        else
            side_by_side(count);
    }
}

// sums[r] += x[r] * panel over some words, for R interleaved rows of words of F; `fresh` sums are taken for zero.
template <int R, class F, class P>
void multiply(const int32_t* x, const P* panel, int words, bool fresh, float* sums) {
    vec total[R][VECTORS] = {};
    if (!fresh)
#pragma GCC unroll 32
        for (int i = 0; i < R * VECTORS; ++i) total[i / VECTORS][i % VECTORS] = load(sums + i * W);
    auto add = [&](const ivec (&row)[VECTORS]) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            ivec value = splat_word(x + r);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) total[r][v] = dot<F>(value, row[v], total[r][v]);
        }
        x += R;
    };
    for (int i = 0; i < words; ++i, panel += COLUMNS * PER_WORD<P>) {
        ivec row[VECTORS], half[VECTORS];
        for (int v = 0; v < VECTORS; ++v) row[v] = load_words(panel + v * W * PER_WORD<P>);
        if constexpr (PER_WORD<F> == PER_WORD<P>) {
            add(row);
        } else {
            for (int v = 0; v < VECTORS; ++v) half[v] = bit_cast<ivec>(low(row[v]));
            add(half);
            for (int v = 0; v < VECTORS; ++v) half[v] = bit_cast<ivec>(high(row[v]));
            add(half);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * VECTORS; ++i) store(sums + i * W, total[i / VECTORS][i % VECTORS]);
}

// `multiply` for a number of rows that is known only now, 1 to ROWS.
template <class F, int R = ROWS, class P>
void multiply_some(int rows, const int32_t* x, const P* panel, int words, bool fresh, float* sums) {
    if (rows == R) return multiply<R, F>(x, panel, words, fresh, sums);
    if constexpr (R > 1) multiply_some<F, R - 1>(rows, x, panel, words, fresh, sums);
}

// Some words of a panel as fp32 factors.
inline void widen(const bf16* panel, int words, float* wide) {
    for (int i = 0; i < words; ++i, panel += 2 * COLUMNS, wide += 2 * COLUMNS)
        for (int column = 0; column < COLUMNS; column += W) {
            ivec both = load_words(panel + 2 * column);
            store(wide + column, low(both));
            store(wide + COLUMNS + column, high(both));
        }
}

// Writes the sums of rows [first, first + rows) and one panel out.
template <class L>
void store_products(const L& l, int64_t first, int rows, int panel, const float* sums) {
    int column = panel * COLUMNS, columns = std::min(COLUMNS, l.n - column);
    for (int row = 0; row < rows; ++row)
        for_each_vec(columns, [&, from = sums + row * COLUMNS, to = l.out + (first + row) * l.n + column](
                                  int i, auto get, auto put) {
            vec value = load(from + i);
            put(to + i, l.bias ? value + get(l.bias + column + i) : value);
        });
}

// Rows [first, first + rows), `x` holding them interleaved, against one panel.
template <class P, class Out>
void multiply_panel(const Linear<P, Out>& l, int64_t first, int rows, int panel, const int32_t* x) {
    using F = Factor<P>;
    alignas(64) float sums[STRIP * COLUMNS];
    for (int from = 0; from < l.words(); from += DEPTH / FACTORS<P>) {
        int words = std::min(DEPTH / FACTORS<P>, l.words() - from);
        auto multiply_block = [&](const auto* block, int words) {
            for (int row = 0; row < rows; row += ROWS) {
                int count = std::min(ROWS, rows - row);
                const int32_t* values = x + size_t(row) * l.width() + size_t(from) * FACTORS<P> * count;
                multiply_some<F>(count, values, block, words, from == 0, sums + row * COLUMNS);
            }
        };
        const P* block = l.panels + (size_t(panel) * l.words() + from) * COLUMNS * PER_WORD<P>;
        if constexpr (FACTORS<P> > 1) {
            if (rows > ROWS) {
                alignas(64) float wide[DEPTH * COLUMNS];
                widen(block, words, wide);
                multiply_block(wide, words * FACTORS<P>);
                continue;
            }
        }
        multiply_block(block, words);
    }
    store_products(l, first, rows, panel, sums);
}

// Some rows, `x` being room for them. Where every thread gets many, it interleaves those that it multiplies; else the
// panels are shared out.
template <class L>
void multiply_rows(const L& l, int32_t* x) {
    constexpr int64_t WORTH_IT = 1 << 20;  // multiply-adds below which the other threads are not woken
    constexpr int MANY = 16 * ROWS;
    const bool worth_it = l.rows * l.n * l.k > WORTH_IT;
    auto some = [&](int64_t first, int64_t most) { return int(std::min(most, l.rows - first)); };
    auto x_of = [&](int64_t row) { return x + row * l.width(); };
    if (l.rows >= l.threads * MANY) {
        int64_t n_strips = divide_up(divide_up(l.rows, STRIP), l.threads) * l.threads;
        int64_t strip = divide_up(divide_up(l.rows, n_strips), ROWS) * ROWS;
#pragma omp parallel for schedule(static) num_threads(l.threads) if (worth_it)
        for (int64_t first = 0; first < l.rows; first += strip) {
            int rows = some(first, strip);
            for (int row = 0; row < rows; row += ROWS)
                interleave(l, first + row, std::min(ROWS, rows - row), x_of(first + row));
            for (int panel = 0; panel < l.n_panels(); ++panel) multiply_panel(l, first, rows, panel, x_of(first));
        }
        return;
    }
#pragma omp parallel for schedule(static) num_threads(l.threads) if (worth_it && l.rows > ROWS)
    for (int64_t row = 0; row < l.rows; row += ROWS) interleave(l, row, some(row, ROWS), x_of(row));
    // Neighbouring panels are taken together while enough are left to share out.
    int64_t n_strips = divide_up(l.rows, STRIP), n_panels = l.n_panels();
    int64_t at_once = std::clamp<int64_t>(n_strips * n_panels / (8 * l.threads), 1, 4);
    int64_t takes = divide_up(n_panels, at_once);
#pragma omp parallel for schedule(dynamic, 1) num_threads(l.threads) if (worth_it)
    for (int64_t work = 0; work < n_strips * takes; ++work) {
        int64_t first = work / takes * STRIP, panel = work % takes * at_once;
        for (int64_t end = std::min(panel + at_once, n_panels); panel < end; ++panel)
            multiply_panel(l, first, some(first, STRIP), int(panel), x_of(first));
    }
}

template <class L>
void linear(const L& l) {
    constexpr int64_t AT_ONCE = 4 * STRIP;  // bounds the working space
    auto* x = reinterpret_cast<int32_t*>(scratch_floats(size_t(std::min(l.rows, AT_ONCE)) * l.width()));
    for (int64_t first = 0; first < l.rows; first += AT_ONCE) {
        L some = l;
        some.x += first * l.k;
        some.out += first * l.n;
        some.rows = std::min(AT_ONCE, l.rows - first);
        multiply_rows(some, x);
    }
}

}  // namespace
