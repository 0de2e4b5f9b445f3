// What attention is asked for, and the lines of it that are worked together: see attention.h.
#pragma once

#include <algorithm>

#include "calls.h"

namespace {

constexpr int TILE = 64, SPLIT = 512, LINES = 96, BLOCKED_LINES = 6;
static_assert(SPLIT % TILE == 0 && TILE % W == 0 && LINES % BLOCKED_LINES == 0, "");

struct Attention {
    const int32_t *cu_q, *kv_len, *block_table;
    int64_t tokens, n_blocks, page, scale_page;  // bytes from one block's head to the next, of cache and scales
    int rows, table_width, q_heads, kv_heads, head_dim, block_size, window, threads;  // window 0: none
    float scale, softcap;                                                             // softcap 0: none
    int group = q_heads / kv_heads;  // query heads of a KV head

    int padded_dim() const { return round_up(head_dim, W); }
    int first_key(int position) const { return window ? std::max(0, position - window + 1) : 0; }
};

// Lines [begin, end) of some Lines, which meet the tile at `first_key` of `row`'s keys, of the KV head `head` of them.
struct Visit {
    int row, first_key, begin, end, head = 0;
};

// Up to LINES lines of `kv_heads` KV heads from `kv_head` on, `each` of a head, one head's after the other's: of one row,
// or of `rows` neighbours with one query each that share their keys below `shared`.
struct Lines {
    int row, rows, kv_head, kv_heads, first, each;
    int key_begin, key_end;  // the keys that any of them attends to
    int shared;              // a multiple of TILE; 0 where there is one row

    int count() const { return each * kv_heads; }
    int split_begin() const { return key_begin / SPLIT; }
    int split_end() const { return (key_end + SPLIT - 1) / SPLIT; }
    // Where the first tile of a split starts.
    int first_key(int split) const { return std::max(split * SPLIT, key_begin / TILE * TILE); }

    int position(const Attention& a, int line) const {
        line %= each;
        if (rows > 1) return a.kv_len[row + line / a.group] - 1;
        return a.kv_len[row] - (a.cu_q[row + 1] - a.cu_q[row]) + (first + line) / a.group;
    }
    // Lines of the line's token and KV head from it on.
    int rest_of_token(const Attention& a, int line) const { return a.group - (first + line % each) % a.group; }
    // Where the line's vector lies in a [tokens, q_heads, head_dim] tensor.
    int64_t offset(const Attention& a, int line) const {
        int i = first + line % each, token = a.cu_q[row] + i / a.group;
        int head = (kv_head + line / each) * a.group + i % a.group;
        return (int64_t(token) * a.q_heads + head) * a.head_dim;
    }

    // The end of the keys of a visit's tile that its lines may attend to.
    int end_of(const Attention& a, const Visit& v) const {
        if (rows == 1) return key_end;
        return v.first_key < shared ? shared : a.kv_len[v.row];
    }
    Visit first_visit(const Attention& a, int split) const {
        int key = first_key(split);
        return rows == 1 || key < shared ? Visit{row, key, 0, each} : own_visit(a, split, row);
    }
    // Moves on to the next head, which lies behind in the cache, or the next tile of a split; false: there is none.
    bool advance(const Attention& a, int split, Visit& v) const {
        if (v.head + 1 < kv_heads) {
            ++v.head;
            v.begin += each;
            v.end += each;
            return true;
        }
        v.begin -= v.head * each;
        v.end -= v.head * each;
        v.head = 0;
        bool together = v.first_key < shared;
        v.first_key += TILE;
        bool within = v.first_key < std::min((split + 1) * SPLIT, end_of(a, v));
        if (within && (!together || v.first_key < shared)) return true;
        if (rows == 1) return false;
        v = own_visit(a, split, together ? row : v.row + 1);
        return v.row < row + rows;
    }

private:
    // The first tile of a split that belongs to one row alone, of `member` or a later row; none: a row past the last.
    Visit own_visit(const Attention& a, int split, int member) const {
        int key = std::max(first_key(split), shared), end = (split + 1) * SPLIT;
        while (member < row + rows && (key >= end || key >= a.kv_len[member])) ++member;
        int line = (member - row) * a.group;
        return {member, key, line, line + a.group};
    }
};

// Softmax state of some lines over some keys: running maximum, sum of exponentials, sum of values. sum 0: no key yet.
struct Partial {
    float *maximum, *sum, *values;

    static size_t size(const Attention& a, int count) { return count * (2 + size_t(a.padded_dim())); }
    Partial(float* memory, int count) : maximum(memory), sum(memory + count), values(memory + 2 * count) {}

    void clear(const Attention& a, int count) {
        std::fill_n(maximum, count, -INF);
        std::fill_n(sum, count, 0.0f);
        std::fill_n(values, size_t(count) * a.padded_dim(), 0.0f);
    }
};

}  // namespace
