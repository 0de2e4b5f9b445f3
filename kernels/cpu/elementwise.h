// Norms, activation, rotary embedding with KV write: each token by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "calls.h"
#include "kv_cache.h"
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
    int64_t tokens, max_position, n_slots, page, scale_page;  // bytes from one block's head to the next
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

// The keys and values of a block and KV head, and their scales; nullptr: there are none.
template <class S>
struct Head {
    S *keys, *values;
    float *key_scales, *value_scales;

    // The one that lies `n` heads behind.
    Head behind(int64_t n, const Rope& s) const {
        auto move = [n](auto* from, int64_t page) {
            return reinterpret_cast<decltype(from)>(reinterpret_cast<char*>(from) + n * page);
        };
        return {move(keys, s.page), move(values, s.page), move(key_scales, s.scale_page),
                move(value_scales, s.scale_page)};
    }
};

// Keeps a token's key and value [dim] at its offset in a block; the layout is that of kv_cache.h.
template <class C>
inline void keep(const C* key, const C* value, int dim, int block_size, int offset, const Head<C>& head) {
    constexpr int P = PER_WORD<C>;
    C *keys = head.keys + offset * P, *values = head.values + offset / P * P * dim + offset % P;
    for (int i = 0; i < dim; ++i) keys[i / P * P * block_size + i % P] = key[i];
    for (int i = 0; i < dim; ++i) values[i * P] = value[i];
}

// The same as small numbers, with their scales.
template <class S>
inline void keep_small(const float* key, const float* value, int dim, int block_size, int offset, const Head<S>& head) {
    Scale of_key = small_scale<S>(key, dim), of_value = small_scale<S>(value, dim);
    head.key_scales[offset] = of_key.value;
    head.value_scales[offset] = of_value.value;
    if constexpr (IN_PAIRS<S>) {
        S *keys = head.keys + offset, *values = head.values + offset * (dim / 2);
        for (int i = 0; i < dim / 2; ++i) {
            store_pair(keys + i * block_size, key[2 * i], key[2 * i + 1], of_key);
            store_pair(values + i, value[i], value[i + dim / 2], of_value);
        }
    } else {
        S keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        for (int i = 0; i < dim; ++i) keys[i] = nearest(key[i] * of_key.inverse);
        for (int i = 0; i < dim; ++i) values[i] = nearest(value[i] * of_value.inverse);
        keep(keys, values, dim, block_size, offset, head);
    }
}

template <class T, class S>
void rope_kv_write(const T* qkv, const float* cos_sin, Indices positions, Indices slots, Head<S> cache, const T* q_norm,
                   const T* k_norm, T* q, const Rope& s) {
    using C = std::conditional_t<LARGEST<S> != 0, float, S>;
    int dim = s.head_dim, heads = s.q_heads + 2 * s.kv_heads;
#pragma omp parallel for num_threads(s.threads) if (s.tokens * heads * dim > THREADS_WORTH_IT)
    for (int64_t token = 0; token < s.tokens; ++token) {
        const T* x = qkv + token * heads * dim;
        const float* angles = cos_sin + positions[token] * dim;
        for (int h = 0; h < s.q_heads; ++h)
            rope_head(x + h * dim, q_norm, s.eps, angles, dim, q + (token * s.q_heads + h) * dim);
        const T *k = x + s.q_heads * dim, *v = k + s.kv_heads * dim;
        int64_t block = slots[token] / s.block_size;
        int offset = slots[token] % s.block_size;
        for (int h = 0; h < s.kv_heads; ++h) {
            C key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
            rope_head(k + h * dim, k_norm, s.eps, angles, dim, key);
            for_each_vec(dim, [&](int i, auto get, auto put) { put(value + i, get(v + h * dim + i)); });
            Head<S> head = cache.behind(block * s.kv_heads + h, s);
            if constexpr (LARGEST<S> != 0)
                keep_small(key, value, dim, s.block_size, offset, head);
            else
                keep(key, value, dim, s.block_size, offset, head);
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
