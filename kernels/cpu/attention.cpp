// The C interface of attention.h.

#include <type_traits>

#include "attention.h"

extern "C" {

const char* batchrun_attention(const void* q, const void* k_cache, const void* v_cache, const float* k_scales,
                               const float* v_scales, void* out, const int32_t* cu_q, const int32_t* kv_len,
                               const int32_t* block_table, int64_t tokens, int64_t n_blocks, int64_t page,
                               int64_t scale_page, int rows, int table_width, int q_heads, int kv_heads, int head_dim,
                               int block_size, int window, float scale, float softcap, bool is_bf16, int cache_type,
                               int threads) {
    Attention a{cu_q,        kv_len,  block_table, tokens,   n_blocks,   page,   scale_page, rows,
                table_width, q_heads, kv_heads,    head_dim, block_size, window, threads,    scale, softcap};
    if (const char* error = check_attention(a)) return error;
    return guarded([&] {
        with_type(is_bf16, [&](auto* type) {
            using Q = std::remove_pointer_t<decltype(type)>;
            with_cache_type(cache_type, [&](auto* stored) {
                using S = std::remove_pointer_t<decltype(stored)>;
                Cache<S> cache{static_cast<const S*>(k_cache), static_cast<const S*>(v_cache), k_scales, v_scales};
                attention(a, static_cast<const Q*>(q), cache, static_cast<Q*>(out));
            });
        });
    });
}

}  // extern "C"
