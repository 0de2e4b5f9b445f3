// What every kernel promises, and what every call needs: how it refuses, its scratch memory, its element types.
//
// The contract that shapes all of them: the bits of one token's result depend on that token's own inputs and position
// alone, never on its neighbours in the batch, on how its request was cut into chunks, on where its blocks lie or on
// the number of threads. So every sum has one fixed order: a dot product runs over its dimension in ascending order (by words, see vectors.h),
// keys are visited in ascending order in tiles and splits that are aligned to position 0, and register blocking
// only decides how many such independent chains run side by side. Fused multiply-adds are explicit and the build turns
// contraction off (-ffp-contract=off), so that no two instances of a template can round differently.
//
// Sums are fp32, but for the exact integers of linear_grouped.h; a result in bf16 is rounded once on the way out. Where the
// processor multiplies bf16 itself it takes subnormal numbers for zero.
//
// Each .cpp is a plain C interface. Layouts and shapes of its tensors were checked; what only their contents tell is
// checked here.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>

#include "vectors.h"

namespace {

constexpr int THREADS_WORTH_IT = 16384;  // elements below which waking the other threads costs more than it saves
constexpr int MAX_HEAD_DIM = 256;

// The message of a refused call, valid until the thread's next one. nullptr is success everywhere.
__attribute__((format(printf, 1, 2))) const char* refuse(const char* format, ...) {
    static thread_local char message[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return message;
}

struct AlignedFree {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float[], AlignedFree>;

Floats make_floats(size_t n) { return Floats(static_cast<float*>(::operator new[](n * 4, std::align_val_t(64)))); }

// n floats of the calling thread's own, uninitialised and kept for the next call.
inline float* scratch_floats(size_t n) {
    static thread_local Floats memory;
    static thread_local size_t size = 0;
    if (size < n) {
        memory.reset();
        memory = make_floats(n);
        size = n;
    }
    return memory.get();
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Runs body(), which may allocate outside of its parallel regions.
template <class Body>
const char* guarded(Body body) {
    try {
        body();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return refuse("there is no memory left for working space");
    }
}

// Calls body(pointer to T) with the type that `is_bf16` names.
template <class Body>
void with_type(bool is_bf16, Body body) {
    if (is_bf16)
        body(static_cast<bf16*>(nullptr));
    else
        body(static_cast<float*>(nullptr));
}

}  // namespace
