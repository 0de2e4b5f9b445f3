// The keys and values that lines meet a tile at a time: where they lie in the cache, and their way to the arithmetic.
#pragma once

#include <algorithm>

#include "attention_lines.h"

namespace {

template <class C>
struct Cache {
    const C *keys, *values;
};

// Neighbouring keys of one block that belong to a tile: `count` from the tile's `first` on. Element d of a key lies d
// rows of the block behind its first one; the values follow one another.
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
    static constexpr int LINE = 64, UNIT = 256;
    const Part *part, *last;
    const char* at = nullptr;
    int row = 0, rows, key_stride, item, left = 0;  // bytes of the row that are left
    int pace, credit = 0;                           // lines, in UNITs: of an advance; that are due

    void next_row() {
        bool is_key = row < rows;
        at = is_key ? part->keys + size_t(row) * key_stride : part->values;
        left = part->count * item * (is_key ? 1 : rows);
        if (row++ < rows) return;
        row = 0;
        ++part;
    }

public:
    // `item` bytes an element, `dim` elements a key, whose neighbours are `block_size` elements apart; in `steps`
    // advances.
    Prefetch(const Tile* tile, int dim, int block_size, int item, int steps)
        : part(tile ? tile->parts : nullptr),
          last(tile ? tile->parts + tile->n_parts : nullptr),
          rows(dim),
          key_stride(block_size * item),
          item(item),
          pace(tile ? (tile->end - tile->begin) * dim * item * 2 / LINE * UNIT / steps + 1 : 0) {}

    void advance() {
        for (credit += pace; credit >= UNIT; credit -= UNIT) {
            if (left <= 0) {
                if (part == last) {
                    pace = credit = 0;
                    return;
                }
                next_row();
            }
            __builtin_prefetch(at);
            at += LINE;
            left -= LINE;
        }
    }
};

// Advances a prefetch in the inner loops of few lines, which wait for memory: before every few keys, or elements, of
// which a head has a multiple of 8.
struct InnerAhead {
    static constexpr int EVERY = 4;
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

// A tile's keys and values as K and V, where they lie or in working memory: `keys` are vectors of W neighbours, whose
// element d lies d * `key_stride` behind the first.
template <class K, class V>
struct Operands {
    const K* keys[TILE / W];
    const V* values[TILE];
    int key_stride;
};

template <class C>
void locate(const Attention& a, Cache<C> cache, const Lines& lines, const Visit& visit, Tile& out) {
    out.begin = std::max(lines.key_begin - visit.first_key, 0);
    out.end = std::min(lines.end_of(a, visit) - visit.first_key, TILE);
    out.n_parts = 0;
    const int32_t* table = a.block_table + int64_t(visit.row) * a.table_width;
    for (int key = out.begin; key < out.end;) {
        int block = (visit.first_key + key) / a.block_size, offset = (visit.first_key + key) % a.block_size;
        int count = std::min(a.block_size - offset, out.end - key);
        int64_t head = (int64_t(table[block]) * a.kv_heads + lines.kv_head) * a.page;
        out.parts[out.n_parts++] = {reinterpret_cast<const char*>(cache.keys + head + offset),
                                    reinterpret_cast<const char*>(cache.values + head + offset * a.head_dim), key, count};
        key += count;
    }
}

// Keys where they lie: a block holds whole vectors. What a vector holds beside the tile's keys is in no line's range.
template <class C, class V>
void use_keys(const Attention& a, const Tile& tile, Operands<C, V>& out) {
    out.key_stride = a.block_size;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        const C* first = reinterpret_cast<const C*>(part.keys) - part.first % W;
        for (int v = part.first / W; v * W < part.first + part.count; ++v, first += W) out.keys[v] = first;
    }
    for (int v = 0; v < TILE / W; ++v)
        if ((v + 1) * W <= tile.begin || v * W >= tile.end) out.keys[v] = out.keys[tile.begin / W];
}

template <class C, class V>
void copy_keys(const Attention& a, const Tile& tile, float* keys, Operands<float, V>& out) {
    out.key_stride = TILE;
    for (int v = 0; v < TILE / W; ++v) out.keys[v] = keys + v * W;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        for (int d = 0; d < a.head_dim; ++d) {
            const C* from = reinterpret_cast<const C*>(part.keys) + size_t(d) * a.block_size;
            for_each_vec(part.count, [&, to = keys + size_t(d) * TILE + part.first](int j, auto get, auto put) {
                put(to + j, get(from + j));
            });
        }
    }
}

template <class K, class V>
void use_values(const Attention& a, const Tile& tile, Operands<K, V>& out) {
    for (int i = 0; i < tile.n_parts; ++i) {
        const V* from = reinterpret_cast<const V*>(tile.parts[i].values);
        for (int j = 0; j < tile.parts[i].count; ++j) out.values[tile.parts[i].first + j] = from + size_t(j) * a.head_dim;
    }
}

template <class C, class K>
void copy_values(const Attention& a, const Tile& tile, float* values, Operands<K, float>& out) {
    for (int i = 0; i < tile.n_parts; ++i) {
        const C* from = reinterpret_cast<const C*>(tile.parts[i].values);
        for (int j = 0; j < tile.parts[i].count; ++j, from += a.head_dim) {
            float* to = values + size_t(tile.parts[i].first + j) * a.padded_dim();
            out.values[tile.parts[i].first + j] = to;
            int d = 0;
            for (; d + W <= a.head_dim; d += W) store(to + d, load(from + d));
            if (d < a.head_dim) store(to + d, load_some(from + d, a.head_dim - d));
        }
    }
}

}  // namespace
