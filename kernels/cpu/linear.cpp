// The C interface of linear.h and linear_grouped.h.

#include <type_traits>

#include "linear.h"
#include "linear_grouped.h"

extern "C" {

// Output columns of a panel: see linear.h.
int batchrun_panel_columns() { return COLUMNS; }

// Whether bfloat16 is multiplied by an instruction, whose rounding is its own: see vectors.h.
int batchrun_multiplies_bf16() { return MULTIPLIES_BF16; }

// Words of so many bytes.
const char* batchrun_pack(const void* weight, void* panels, int n, int words, int bytes, int threads) {
    auto as = [&](auto word) {
        using Word = decltype(word);
        pack(static_cast<const Word*>(weight), static_cast<Word*>(panels), n, words, threads);
    };
    switch (bytes) {
        case 1: as(uint8_t{}); break;
        case 2: as(uint16_t{}); break;
        default: as(uint32_t{});
    }
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

// 4-bit integers if `is_int4`, else int8.
const char* batchrun_linear_grouped(const void* x, const void* panels, const float* scales, const float* minimums,
                                    const void* bias, void* out, int64_t rows, int n, int k, int group, bool is_int4,
                                    bool is_bf16, bool out_is_bf16, int threads) {
    return guarded([&] {
        with_type(is_bf16, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            with_type(out_is_bf16, [&](auto* out_type) {
                using Out = std::remove_pointer_t<decltype(out_type)>;
                auto of = [&](auto* panels) {
                    using P = std::remove_const_t<std::remove_pointer_t<decltype(panels)>>;
                    linear(LinearGrouped<T, Out, P>{static_cast<const T*>(x), panels, scales, minimums,
                                                    static_cast<const T*>(bias), static_cast<Out*>(out), rows, n, k,
                                                    group, threads});
                };
                if (is_int4)
                    of(static_cast<const nibbles*>(panels));
                else
                    of(static_cast<const int8_t*>(panels));
            });
        });
    });
}

}  // extern "C"
