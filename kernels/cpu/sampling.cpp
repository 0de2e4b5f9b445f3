// The C interface of sampling.h.

#include "sampling.h"

extern "C" {

const char* batchrun_argmax(const float* logits, int64_t* out, int64_t rows, int n, int threads) {
    argmax_rows(logits, out, rows, n, threads);
    return nullptr;
}

const char* batchrun_draw(const float* logits, const float* temperature, const float* log_min_p, const float* top_p,
                          const int64_t* top_k, const int64_t* key, const int64_t* position, int64_t* out, int64_t rows,
                          int n, int threads) {
    return guarded([&] { draw_rows(logits, {temperature, log_min_p, top_p, top_k, key, position}, out, rows, n, threads); });
}

}  // extern "C"
