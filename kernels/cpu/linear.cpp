// The C interface of linear.h and linear_int8.h.

#include <type_traits>

#include "linear.h"
#include "linear_int8.h"

extern "C" {

// Output columns of a panel: see linear.h.
int batchrun_panel_columns() { return COLUMNS; }

// Whether bfloat16 is multiplied by an instruction, whose rounding is its own: see vectors.h.
int batchrun_multiplies_bf16() { return MULTIPLIES_BF16; }

// A word of int8 is stored in 16 bits, all others in 32.
const char* batchrun_pack(const void* weight, void* panels, int n, int words, bool is_int8, int threads) {
    if (is_int8)
        pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(panels), n, words, threads);
    else
        pack(static_cast<const uint32_t*>(weight), static_cast<uint32_t*>(panels), n, words, threads);
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

// Columns of an int8 weight that are summed exactly: see linear_int8.h.
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

}  // extern "C"
