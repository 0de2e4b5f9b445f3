// The C interface of elementwise.h.

#include <type_traits>

#include "elementwise.h"

extern "C" {

const char* batchrun_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int n,
                              float eps, bool is_bf16, int threads) {
    with_type(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        rms_norm(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight), eps,
                 static_cast<T*>(out), rows, n, threads);
    });
    return nullptr;
}

const char* batchrun_silu_mul(const void* gate_up, void* out, int64_t rows, int n, bool is_bf16, int threads) {
    with_type(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        silu_mul(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, n, threads);
    });
    return nullptr;
}

const char* batchrun_rope_kv_write(const void* qkv, const float* cos_sin, const void* positions, bool wide_positions,
                                   const void* slots, bool wide_slots, void* k_cache, void* v_cache, float* k_scales,
                                   float* v_scales, const void* q_norm, const void* k_norm, void* q, int64_t tokens,
                                   int64_t max_position, int64_t n_blocks, int64_t page, int64_t scale_page,
                                   int q_heads, int kv_heads, int head_dim, int block_size, float eps, bool is_bf16,
                                   int cache_type, int threads) {
    Rope shape{tokens,   max_position, n_blocks * block_size, page,    scale_page, q_heads,
               kv_heads, head_dim,     block_size,            threads, eps};
    Indices at{positions, wide_positions}, to{slots, wide_slots};
    if (const char* error = check_rope(at, to, shape)) return error;
    with_type(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_cache_type(cache_type, [&](auto* stored) {
            using S = std::remove_pointer_t<decltype(stored)>;
            Head<S> cache{static_cast<S*>(k_cache), static_cast<S*>(v_cache), k_scales, v_scales};
            rope_kv_write(static_cast<const T*>(qkv), cos_sin, at, to, cache, static_cast<const T*>(q_norm),
                          static_cast<const T*>(k_norm), static_cast<T*>(q), shape);
        });
    });
    return nullptr;
}

}  // extern "C"
