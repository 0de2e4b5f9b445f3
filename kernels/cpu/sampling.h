// Logits to tokens: the largest of each row, or a draw from its distribution.
//
// A draw is the largest of logit + Gumbel noise (Gumbel-max), whose noise is counter-based: it depends on the row's key,
// the position and the token alone. No Gumbel value exceeds MAX_GUMBEL, so noise is computed only for tokens that can
// still win.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "calls.h"

namespace {

constexpr float MAX_GUMBEL = 17.4f;

// The first place of the largest of x[n]; -1 if one is NaN.
inline int64_t argmax(const float* x, int n) {
    vec best = splat(-INF);
    ivec broken{};
    int i = 0;
    for (; i + W <= n; i += W) {
        vec value = load(x + i);
        best = max(value, best);
        broken |= value != value;
    }
    float top = largest(best);
    bool is_broken = any(broken);
    for (; i < n; ++i) {
        top = std::max(top, x[i]);
        is_broken |= std::isnan(x[i]);
    }
    return is_broken ? -1 : std::find(x, x + n, top) - x;
}

inline void argmax_rows(const float* x, int64_t* out, int64_t rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; ++row) out[row] = argmax(x + row * n, n);
}

// The first word of Philox4x32-10 at counter (word, position, 0, 0). (Salmon et al., SC 2011)
inline uint32_t philox(uint64_t key, uint32_t position, uint32_t word) {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    uint32_t c0 = word, c1 = position, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        uint64_t p0 = uint64_t(0xD2511F53) * c0, p1 = uint64_t(0xCD9E8D57) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

// In (0, 1), on a grid of 2^-24.
inline double uniform(uint64_t key, int64_t position, int64_t token) {
    return ((philox(key, uint32_t(position), uint32_t(token)) >> 8) + 0.5) * 0x1p-24;
}

inline float gumbel(double uniform) { return float(-std::log(-std::log(uniform))); }

// Hands out the values of x[n] from the largest on, whose place is unknown to it; `heap` is room for n.
class Descending {
    const float *x, *end;
    float *heap, below, span = 8;  // values from `below` on have been gathered, in bands that widen
    int count = 0;
    bool all = false;

    void gather() {
        float from = below - span;
        all = span > 64;
        if (all) from = -INF;
        bool first = span == 8;
        for (const float* at = x; at < end; ++at)
            if (*at >= from && (first || *at < below)) heap[count++] = *at;
        std::make_heap(heap, heap + count);
        below = from;
        span *= 4;
    }

public:
    Descending(const float* x, int n, float largest, float* heap) : x(x), end(x + n), heap(heap), below(largest) {}

    // False: there are no more.
    bool next(float& value) {
        while (count == 0) {
            if (all) return false;
            gather();
        }
        std::pop_heap(heap, heap + count);
        value = heap[--count];
        return true;
    }
};

// What each row [rows] is drawn by; see `draw` in __init__.py.
struct Draw {
    const float *temperature, *log_min_p, *top_p;
    const int64_t *top_k, *key, *position;
};

// The sum of e^(x - largest) over those of x[n] that are at least `cut`.
inline double mass_above(const float* x, int n, float cut, float largest) {
    constexpr int CHUNK = 1024;  // summed in float
    double total = 0;
    for (int from = 0; from < n; from += CHUNK) {
        vec part{};
        for_each_vec(std::min(CHUNK, n - from), [&](int i, auto get, auto) {
            vec value = get(x + from + i);
            part += value >= cut ? exp(value - largest) : vec{};
        });
        total += sum(part);
    }
    return total;
}

// The smallest of x[n] that min_p, top_k and top_p keep, in this order.
inline float cutoff(const float* x, int n, float largest, const Draw& d, int64_t row, float* heap) {
    float cut = largest + d.log_min_p[row], value;
    if (d.top_k[row] < n) {
        Descending values(x, n, largest, heap);
        for (int64_t i = 0; i < d.top_k[row] && values.next(value); ++i) cut = i + 1 < d.top_k[row] ? cut : std::max(cut, value);
    }
    if (d.top_p[row] < 1) {
        double wanted = d.top_p[row] * mass_above(x, n, cut, largest), before = 0;
        float last = largest;
        for (Descending values(x, n, largest, heap); before < wanted && values.next(value) && value >= cut; last = value)
            before += exp(value - largest);
        cut = std::max(cut, last);
    }
    return cut;
}

// A token for a row of logits[n]; `x` is room for n, and so is `heap`.
inline int64_t draw(const float* logits, int n, const Draw& d, int64_t row, float* x, float* heap) {
    float temperature = d.temperature[row];
    for_each_vec(n, [&](int i, auto get, auto put) { put(x + i, get(logits + i) / temperature); });
    int64_t best = argmax(x, n);
    if (best < 0) return best;
    float largest = x[best], cut = cutoff(x, n, largest, d, row, heap);
    float score = largest + gumbel(uniform(d.key[row], d.position[row], best));
    auto consider = [&](int token) {
        double u = uniform(d.key[row], d.position[row], token);
        // To win, -log(u) must not exceed e^(x - score), and it always exceeds 1 - u.
        if (1 - u > 1.001 * exp(x[token] - score)) return;
        float other = x[token] + gumbel(u);
        if (other < score || (other == score && token > best)) return;
        score = other;
        best = token;
    };
    float floor = std::max(cut, score - MAX_GUMBEL);
    for (int i = 0; i < n; i += W) {
        int count = std::min(W, n - i);
        if (count == W && !any(load(x + i) >= floor)) continue;
        for (int token = i; token < i + count; ++token)
            if (x[token] >= floor) consider(token);
        floor = std::max(cut, score - MAX_GUMBEL);
    }
    return best;
}

inline void draw_rows(const float* logits, const Draw& d, int64_t* out, int64_t rows, int n, int threads) {
    float* memory = scratch_floats(size_t(2) * n * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (rows > 1)
    for (int64_t row = 0; row < rows; ++row) {
        float* x = memory + size_t(2) * n * omp_get_thread_num();
        out[row] = draw(logits + row * n, n, d, row, x, x + n);
    }
}

}  // namespace
