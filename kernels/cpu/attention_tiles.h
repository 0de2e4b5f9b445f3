// The keys and values that lines meet a tile at a time: where they lie in the cache, and their way to the arithmetic.
#pragma once

#include <algorithm>

#include "attention_lines.h"

namespace {

template <class C>
struct Cache {
    const C *keys, *values;
};

// Neighbouring keys of one block that belong to a tile: `count` from the tile's `first` on, whole words of values. Their
// words of keys are rows of the block; their words of values follow one another.
struct Part {
    const char *keys, *values;
    int first, count;
};

// Addresses of a tile's keys and values, those in [begin, end).
struct Tile {
    Part parts[TILE];
    int n_parts, begin, end;
};

// Fetches a tile's memory, a few cache lines at each `advance`, between the arithmetic on the tile before, so that
// neither waits for the other.
class Prefetch {
    static constexpr int LINE = 64, WORD = 4;
    static constexpr int SECOND_LEVEL = 2;  // of cache: the first has no room for another tile
    const Part *part, *last;
    const char* at = nullptr;
    int row = 0, words, block_size, left = 0;  // of the row that is fetched: lines that are left
    int pace;                                  // lines of an advance

    // A part of a whole block is one row of keys, any other one for each word; its values are one more.
    void next_row() {
        int rows = part->count == block_size ? 1 : words;
        at = row < rows ? part->keys + size_t(row) * block_size * WORD : part->values;
        left = (part->count * WORD * (row < rows ? words / rows : words) + LINE - 1) / LINE;
        if (row++ < rows) return;
        row = 0;
        ++part;
    }

public:
    // `words` of a key, whose neighbours are `block_size` words apart; in `steps` advances.
    Prefetch(const Tile* tile, int words, int block_size, int steps)
        : part(tile ? tile->parts : nullptr),
          last(tile ? tile->parts + tile->n_parts : nullptr),
          words(words),
          block_size(block_size),
          pace(tile ? (tile->end - tile->begin) * words * WORD * 2 / LINE / steps + 1 : 0) {}

    void advance() {
        for (int due = pace; due > 0;) {
            if (left == 0) {
                if (part == last) {
                    pace = 0;
                    return;
                }
                next_row();
            }
            int n = std::min(due, left);
            const char *from = at, *to = at + n * LINE;
            for (; from < to; from += LINE) __builtin_prefetch(from, 0, SECOND_LEVEL);
            at = to;
            left -= n;
            due -= n;
        }
    }
};

// Advances a prefetch in the inner loops of few lines, which wait for memory: before every few words, of which a head
// has an even number; more of them at a time leave the memory idle in between.
struct InnerAhead {
    static constexpr int EVERY = 2;
    Prefetch& prefetch;
    void inner() { prefetch.advance(); }
    void outer() {}
};
// Advances a prefetch before each of many blocks of lines, whose inner loops are the faster for having nothing else to do.
struct OuterAhead {
    static constexpr int EVERY = 1;
    Prefetch& prefetch;
    void inner() {}
    void outer() { prefetch.advance(); }
};

// A tile's keys and values, where they lie or in working memory: `keys` are W neighbours' first words, whose next ones
// lie `key_stride` words behind; `values` are the words of PER_WORD neighbours.
template <class C>
struct Operands {
    const C* keys[TILE / W];
    const C* values[TILE / PER_WORD<C>];
    int key_stride;
};

template <class C>
void locate(const Attention& a, Cache<C> cache, const Lines& lines, const Visit& visit, Tile& out) {
    constexpr int P = PER_WORD<C>;
    out.begin = std::max(lines.key_begin - visit.first_key, 0) / P * P;
    out.end = round_up(std::min(lines.end_of(a, visit) - visit.first_key, TILE), P);
    out.n_parts = 0;
    const int32_t* table = a.block_table + int64_t(visit.row) * a.table_width;
    for (int key = out.begin; key < out.end;) {
        int block = (visit.first_key + key) / a.block_size, offset = (visit.first_key + key) % a.block_size;
        int count = std::min(a.block_size - offset, out.end - key);
        int64_t head = (int64_t(table[block]) * a.kv_heads + lines.kv_head + visit.head) * a.page;
        out.parts[out.n_parts++] = {reinterpret_cast<const char*>(cache.keys + head + offset * P),
                                    reinterpret_cast<const char*>(cache.values + head + offset * a.head_dim), key, count};
        key += count;
    }
}

// Operands where they lie: blocks and heads hold whole vectors. What a vector holds beside the tile's keys is in no
// line's range.
template <class C>
void use_in_place(const Attention& a, const Tile& tile, Operands<C>& out) {
    constexpr int P = PER_WORD<C>;
    out.key_stride = a.block_size;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        const C* keys = reinterpret_cast<const C*>(part.keys) - part.first % W * P;
        for (int v = part.first / W; v * W < part.first + part.count; ++v, keys += W * P) out.keys[v] = keys;
        const C* values = reinterpret_cast<const C*>(part.values);
        for (int j = 0; j < part.count; j += P, values += a.head_dim * P) out.values[(part.first + j) / P] = values;
    }
    for (int v = 0; v < TILE / W; ++v)
        if ((v + 1) * W <= tile.begin || v * W >= tile.end) out.keys[v] = out.keys[tile.begin / W];
}

// Operands in working memory, filled up to whole vectors.
template <class C>
void copy(const Attention& a, const Tile& tile, C* keys, C* values, Operands<C>& out) {
    constexpr int P = PER_WORD<C>;
    out.key_stride = TILE;
    for (int v = 0; v < TILE / W; ++v) out.keys[v] = keys + v * W * P;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        const C* from = reinterpret_cast<const C*>(part.keys);
        for (int word = 0; word < a.head_dim / P; ++word, from += a.block_size * P)
            std::copy_n(from, part.count * P, keys + (word * TILE + part.first) * P);
        from = reinterpret_cast<const C*>(part.values);
        for (int j = part.first; j < part.first + part.count; j += P, from += a.head_dim * P) {
            C* to = values + j * a.padded_dim();
            std::copy_n(from, a.head_dim * P, to);
            std::fill_n(to + a.head_dim * P, (a.padded_dim() - a.head_dim) * P, C{});
            out.values[j / P] = to;
        }
    }
}

}  // namespace
