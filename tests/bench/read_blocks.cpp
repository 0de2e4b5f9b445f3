// Reads blocks of memory, in the order of their numbers in `blocks`, and does nothing with them.
#include <cstddef>
#include <cstdint>

// The first `head` bytes of each block are fetched while the one before is read: all of them, or as many as it takes
// until the processor notices that memory is read in order.
extern "C" void read_blocks(const char* memory, const int32_t* blocks, int64_t n_blocks, int64_t block_bytes,
                            int64_t head, int threads) {
    constexpr int64_t LINE = 64;
    constexpr int SECOND_LEVEL = 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; ++part) {
        int64_t begin = n_blocks * part / threads, end = n_blocks * (part + 1) / threads;
        for (int64_t i = begin; i < end; ++i) {
            const char* block = memory + blocks[i] * block_bytes;
            const char* next = memory + blocks[i + 1 < end ? i + 1 : i] * block_bytes;
            for (int64_t at = 0; at < block_bytes; at += LINE) {
                int64_t ahead = at + head - block_bytes;
                if (ahead >= 0) __builtin_prefetch(next + ahead, 0, SECOND_LEVEL);
                *static_cast<const volatile int64_t*>(static_cast<const void*>(block + at));
            }
        }
    }
}
