// Norms, activation, rotary embedding with KV write: each token by itself.
#pragma once

#include <algorithm>
#include <cmath>

#include "calls.h"
#include "vectors.h"

namespace {

// 1 / sqrt(mean of squares + eps) of x[n].
template <class T>
inline float inverse_rms(const T* x, int n, float eps) {
    vec squares{};
    for_each_vec(n, [&](int i, auto get, auto) {
        vec value = get(x + i);
        squares = fma(value, value, squares);
    });
    return 1.0f / std::sqrt(sum(squares) / n + eps);
}

template <class T>
inline void normalise(const T* x, const T* weight, float eps, int n, T* out) {
    float inverse = inverse_rms(x, n, eps);
    for_each_vec(n, [&](int i, auto get, auto put) { put(out + i, get(x + i) * inverse * get(weight + i)); });
}

template <class T>
void rms_norm(const T* x, T* residual, const T* weight, float eps, T* out, int64_t rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > THREADS_WORTH_IT)
    for (int64_t row = 0; row < rows; ++row) {
        const T* input = x + row * n;
        if (residual) {
            T* added = residual + row * n;
            for_each_vec(n, [&](int i, auto get, auto put) { put(added + i, get(added + i) + get(input + i)); });
            input = added;
        }
        normalise(input, weight, eps, n, out + row * n);
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > THREADS_WORTH_IT)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * n, *up = gate + n;
        for_each_vec(n, [&](int i, auto get, auto put) {
            vec g = get(gate + i);
            put(out + row * n + i, g / (1.0f + exp(-g)) * get(up + i));
        });
    }
}

struct Rope {
    int64_t tokens, max_position, n_slots, page;  // page: elements from one block's head to the next in the cache
    int q_heads, kv_heads, head_dim, block_size, threads;
    float eps;
};

// A flat index tensor of int32 or int64.
struct Indices {
    const void* data;
    bool wide;
    int64_t operator[](int64_t i) const {
        return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

// One head: normalised if there is a weight, rotated by halves (Hugging Face's rotate_half), rounded to Out.
template <class T, class Out>
inline void rope_head(const T* x, const T* norm, float eps, const float* cos_sin, int dim, Out* out) {
    int half = dim / 2;
    float inverse = norm ? inverse_rms(x, dim, eps) : 1.0f;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    for_each_vec(half, [&](int i, auto get, auto put) {
        vec a = get(x + i), b = get(x + half + i);
        if (norm) {
            a = a * inverse * get(norm + i);
            b = b * inverse * get(norm + half + i);
        }
        vec c = get(cosine + i), s = get(sine + i);
        put(out + i, a * c - b * s);
        put(out + half + i, b * c + a * s);
    });
}

template <class T, class C>
void rope_kv_write(const T* qkv, const float* cos_sin, Indices positions, Indices slots, C* k_cache, C* v_cache,
                   const T* q_norm, const T* k_norm, T* q, const Rope& s) {
    int dim = s.head_dim, heads = s.q_heads + 2 * s.kv_heads;
#pragma omp parallel for num_threads(s.threads) if (s.tokens * heads * dim > THREADS_WORTH_IT)
    for (int64_t token = 0; token < s.tokens; ++token) {
        const T* x = qkv + token * heads * dim;
        const float* angles = cos_sin + positions[token] * dim;
        for (int h = 0; h < s.q_heads; ++h)
            rope_head(x + h * dim, q_norm, s.eps, angles, dim, q + (token * s.q_heads + h) * dim);
        const T *k = x + s.q_heads * dim, *v = k + s.kv_heads * dim;
        int64_t block = slots[token] / s.block_size, offset = slots[token] % s.block_size;
        for (int h = 0; h < s.kv_heads; ++h) {
            // The layout is that of attention.h.
            constexpr int P = PER_WORD<C>;
            int64_t head = (block * s.kv_heads + h) * s.page;
            C key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
            rope_head(k + h * dim, k_norm, s.eps, angles, dim, key);
            for_each_vec(dim, [&](int i, auto get, auto put) { put(value + i, get(v + h * dim + i)); });
            C *keys = k_cache + head + offset * P, *values = v_cache + head + offset / P * P * dim + offset % P;
            for (int i = 0; i < dim; ++i) keys[i / P * P * s.block_size + i % P] = key[i];
            for (int i = 0; i < dim; ++i) values[i * P] = value[i];
        }
    }
}

const char* check_rope(Indices positions, Indices slots, const Rope& s) {
    for (int64_t token = 0; token < s.tokens; ++token) {
        if (positions[token] < 0 || positions[token] >= s.max_position)
            return refuse("token %lld has position %lld, outside of [0, %lld)", (long long)token,
                          (long long)positions[token], (long long)s.max_position);
        if (slots[token] < 0 || slots[token] >= s.n_slots)
            return refuse("token %lld has cache slot %lld, outside of [0, %lld)", (long long)token,
                          (long long)slots[token], (long long)s.n_slots);
    }
    return nullptr;
}

}  // namespace
