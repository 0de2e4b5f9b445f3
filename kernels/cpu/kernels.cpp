// The CPU kernels of batchrun behind a plain C interface: linear layers, paged attention, norms, SiLU * up, and RoPE with
// KV write.
//
// The contract that shapes all of it: the bits of one token's result depend on that token's own inputs and position
// alone, never on its neighbours in the batch, on how its request was cut into chunks, on where its blocks lie or on
// the number of threads. So every sum has one fixed order: a dot product runs over its dimension in ascending order,
// keys are visited in ascending order in tiles and splits that are aligned to position 0, and register blocking
// only decides how many such independent chains run side by side. Fused multiply-adds are explicit and the build turns
// contraction off (-ffp-contract=off), so that no two instances of a template can round differently.
//
// Arithmetic is fp32 throughout, but for the exact integers of linear_int8.h; bf16 is a storage format, rounded once on
// the way out.

#include <type_traits>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "linear_int8.h"

// The C interface. Tensors are contiguous and of checked shapes; what only their contents tell is checked here.

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

// Output columns of a panel: see linear.h.
int batchrun_panel_columns() { return COLUMNS; }

const char* batchrun_pack(const void* weight, void* panels, int n, int k, bool is_bf16, int threads) {
    with_type(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        pack(static_cast<const T*>(weight), static_cast<T*>(panels), n, k, threads);
    });
    return nullptr;
}

const char* batchrun_linear(const void* x, const void* panels, const void* bias, void* out, int64_t rows, int n, int k,
                            bool is_bf16, bool out_is_bf16, int threads) {
    return guarded([&] {
        with_type(is_bf16, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            with_type(out_is_bf16, [&](auto* out_type) {
                using Out = std::remove_pointer_t<decltype(out_type)>;
                linear(Linear<T, Out>{static_cast<const T*>(x), static_cast<const T*>(panels), static_cast<const T*>(bias),
                                      static_cast<Out*>(out), rows, n, k, threads});
            });
        });
    });
}

// Columns of an int8 weight that are summed exactly: see linear_int8.h. Its panels are packed as bf16's, a pair as one.
int batchrun_max_int8_depth() { return MAX_INT8_DEPTH; }

const char* batchrun_linear_int8(const void* x, const void* panels, const float* scales, const void* bias, void* out,
                                 int64_t rows, int n, int k, bool is_bf16, bool out_is_bf16, int threads) {
    return guarded([&] {
        with_type(is_bf16, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            with_type(out_is_bf16, [&](auto* out_type) {
                using Out = std::remove_pointer_t<decltype(out_type)>;
                linear(LinearInt8<T, Out>{{static_cast<const T*>(x), static_cast<const int8_t*>(panels),
                                           static_cast<const T*>(bias), static_cast<Out*>(out), rows, n, k, threads},
                                          scales});
            });
        });
    });
}

const char* batchrun_argmax(const float* x, int64_t* out, int64_t rows, int n, int threads) {
    argmax_rows(x, out, rows, n, threads);
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
                                   const void* slots, bool wide_slots, void* k_cache, void* v_cache, const void* q_norm,
                                   const void* k_norm, void* q, int64_t tokens, int64_t max_position, int64_t n_blocks,
                                   int64_t page, int q_heads, int kv_heads, int head_dim, int block_size, float eps,
                                   bool is_bf16, bool cache_is_bf16, int threads) {
    Rope shape{tokens,   max_position, n_blocks * block_size, page, q_heads, kv_heads,
               head_dim, block_size,   threads,               eps};
    Indices at{positions, wide_positions}, to{slots, wide_slots};
    if (const char* error = check_rope(at, to, shape)) return error;
    with_type(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_type(cache_is_bf16, [&](auto* cache_type) {
            using C = std::remove_pointer_t<decltype(cache_type)>;
            rope_kv_write(static_cast<const T*>(qkv), cos_sin, at, to, static_cast<C*>(k_cache),
                          static_cast<C*>(v_cache), static_cast<const T*>(q_norm), static_cast<const T*>(k_norm),
                          static_cast<T*>(q), shape);
        });
    });
    return nullptr;
}

const char* batchrun_attention(const void* q, const void* k_cache, const void* v_cache, void* out, const int32_t* cu_q,
                               const int32_t* kv_len, const int32_t* block_table, int64_t tokens, int64_t n_blocks,
                               int64_t page, int rows, int table_width, int q_heads, int kv_heads, int head_dim,
                               int block_size, int window, float scale, float softcap, bool is_bf16, bool cache_is_bf16,
                               int threads) {
    Attention a{cu_q,     kv_len,   block_table, tokens, n_blocks, page,  rows,   table_width, q_heads,
                kv_heads, head_dim, block_size,  window, threads,  scale, softcap};
    if (const char* error = check_attention(a)) return error;
    return guarded([&] {
        with_type(is_bf16, [&](auto* type) {
            using Q = std::remove_pointer_t<decltype(type)>;
            with_type(cache_is_bf16, [&](auto* cache_type) {
                using C = std::remove_pointer_t<decltype(cache_type)>;
                Cache<C> cache{static_cast<const C*>(k_cache), static_cast<const C*>(v_cache)};
                attention(a, static_cast<const Q*>(q), cache, static_cast<Q*>(out));
            });
        });
    });
}

}  // extern "C"
