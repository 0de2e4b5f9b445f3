// The keys and values that lines meet a tile at a time: where they lie in the cache, and their way to the arithmetic.
#pragma once

#include <algorithm>

#include "attention_lines.h"
#include "kv_cache.h"

namespace {

// A cache of S, and the scales of its keys and values; nullptr where there are none.
template <class S>
struct Cache {
    const S *keys, *values;
    const float *key_scales, *value_scales;
};

// Bytes of a token in each of its head's rows of keys: a word, or a pair.
template <class S>
constexpr int IN_ROW = IN_PAIRS<S> ? sizeof(S) : sizeof(S) * PER_WORD<S>;
// The rows.
template <class S>
int key_rows(const Attention& a) {
    return a.head_dim / (IN_PAIRS<S> ? 2 : PER_WORD<S>);
}

// Neighbouring keys of one block that belong to a tile: `count` from the tile's `first` on, whole words of values. Their
// words or pairs of keys are rows of the block; their values follow one another. nullptr: there are no scales.
struct Part {
    const char *keys, *values;
    const float *key_scales, *value_scales;
    int first, count;
};

// Addresses of a tile's keys and values, those in [begin, end).
struct Tile {
    Part parts[TILE];
    int n_parts, begin, end;
};

// Fetches a tile's memory, a few cache lines at each `advance`, between the arithmetic on the tile before, so that
// neither waits for the other. Its parts take turns: the processor follows several places that are read in order, and
// reads ahead at each.
class Prefetch {
    static constexpr int LINE = 64;
    static constexpr int SECOND_LEVEL = 2;     // of cache: the first has no room for another tile
    static constexpr int TURN = 2 * LINE;      // bytes
    static constexpr int64_t WHOLE = 1 << 16;  // units of a turn

    // A part, its next row, and what is left of the one that is fetched.
    struct Place {
        const Part* part;
        int row;
        const char *at, *end;
    };
    Place places[TILE];
    int n_places = 0, turn = 0, key_rows, in_row, block_size;
    int64_t pace = 0, due = 0;  // of an advance, and what it has to catch up with, in units

    // In the order of use: two rows of scales, if there are any, of keys one where the part is a whole block and all
    // where not, and one of values. False: there is no row left.
    bool next_row(Place& place) const {
        const Part& part = *place.part;
        int rows = part.count == block_size ? 1 : key_rows, row = place.row++;
        int bytes = part.count * in_row * key_rows;
        if (row < 0) {
            place.at = reinterpret_cast<const char*>(row == -2 ? part.key_scales : part.value_scales);
            bytes = part.count * int(sizeof(float));
        } else if (row < rows) {
            place.at = part.keys + size_t(row) * block_size * in_row;
            bytes /= rows;
        } else if (row == rows) {
            place.at = part.values;
        } else {
            return false;
        }
        place.end = place.at + bytes;
        return true;
    }

public:
    // `key_rows` of a block, in each of which a key takes `in_row` bytes; in `steps` advances. nullptr: nothing.
    Prefetch(const Tile* tile, int key_rows, int in_row, int block_size, int steps)
        : key_rows(key_rows), in_row(in_row), block_size(block_size) {
        if (!tile) return;
        bool scaled = tile->parts[0].key_scales;
        for (; n_places < tile->n_parts; ++n_places) {
            Place& place = places[n_places];
            place.part = tile->parts + n_places;
            place.row = scaled ? -2 : 0;
            next_row(place);
        }
        int64_t token_bytes = 2 * (key_rows * in_row + (scaled ? sizeof(float) : 0));
        pace = (tile->end - tile->begin) * token_bytes * WHOLE / (int64_t(TURN) * steps);
        pace += pace / (scaled ? 4 : 8);  // what it takes to have all in time, as measured
    }

    void advance() {
        for (due += pace; due >= WHOLE && n_places > 0; due -= WHOLE) {
            Place& place = places[turn];
            for (int i = 0; i < TURN; i += LINE) __builtin_prefetch(place.at + i, 0, SECOND_LEVEL);
            place.at += TURN;
            if (place.at < place.end || next_row(place))
                ++turn;
            else
                place = places[--n_places];
            if (turn >= n_places) turn = 0;
        }
    }
};

// Advances a prefetch in the inner loops of few lines, which wait for memory: all the time, for what is fetched at once
// leaves the memory idle in between.
struct InnerAhead {
    Prefetch& prefetch;
    void inner() { prefetch.advance(); }
    void outer() {}
};
// Advances a prefetch before each of many blocks of lines, whose inner loops are the faster for having nothing else to do.
struct OuterAhead {
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

// The parts of a visit's tile that begin and end with whole words of C.
template <class C, class S>
void locate(const Attention& a, Cache<S> cache, const Lines& lines, const Visit& visit, Tile& out) {
    constexpr int P = PER_WORD<C>;
    out.begin = std::max(lines.key_begin - visit.first_key, 0) / P * P;
    out.end = round_up(std::min(lines.end_of(a, visit) - visit.first_key, TILE), P);
    out.n_parts = 0;
    const int32_t* table = a.block_table + int64_t(visit.row) * a.table_width;
    for (int key = out.begin; key < out.end;) {
        int block = (visit.first_key + key) / a.block_size, offset = (visit.first_key + key) % a.block_size;
        int count = std::min(a.block_size - offset, out.end - key);
        int64_t head = int64_t(table[block]) * a.kv_heads + lines.kv_head + visit.head;
        auto at = [&](const void* from, int64_t page, int token_bytes) {
            return static_cast<const char*>(from) + head * page + int64_t(offset) * token_bytes;
        };
        auto scales = [&](const float* from) {
            return from ? reinterpret_cast<const float*>(at(from, a.scale_page, sizeof *from)) : nullptr;
        };
        out.parts[out.n_parts++] = {at(cache.keys, a.page, IN_ROW<S>),
                                    at(cache.values, a.page, key_rows<S>(a) * IN_ROW<S>),
                                    scales(cache.key_scales), scales(cache.value_scales), key, count};
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

// Operands of 8-bit floats, which are exactly C's, in working memory.
template <class C>
void widen(const Attention& a, const Tile& tile, const fp8_pair*, C* keys, C* values, Operands<C>& out) {
    constexpr bool JOINED = PER_WORD<C> == 2;  // two numbers to a word
    const int half = a.head_dim / 2, padded = a.padded_dim();
    auto words = [](C* to) { return reinterpret_cast<float*>(to); };
    out.key_stride = TILE;
    for (int v = 0; v < TILE / W; ++v) out.keys[v] = keys + v * W * PER_WORD<C>;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        auto* from = reinterpret_cast<const fp8_pair*>(part.keys);
        float* to = words(keys) + part.first;
        for (int pair = 0; pair < half; ++pair, from += a.block_size, to += JOINED ? TILE : 2 * TILE)
            for_each_vec(part.count, [&](int key, auto get, auto put) {
                Pairs x = get(from + key);
                put(to + key, JOINED ? bit_cast<vec>(join(x.first, x.second)) : x.first);
                if (!JOINED) put(to + TILE + key, x.second);
            });
        from = reinterpret_cast<const fp8_pair*>(part.values);
        for (int j = part.first; j < part.first + part.count; j += PER_WORD<C>, from += half * PER_WORD<C>) {
            C* row = values + size_t(j) * padded;
            for_each_vec(half, [&](int d, auto get, auto put) {
                Pairs x = get(from + d);
                if (JOINED) {
                    Pairs next = get(from + half + d);
                    x = {bit_cast<vec>(join(x.first, next.first)), bit_cast<vec>(join(x.second, next.second))};
                }
                put(words(row) + d, x.first);
                put(words(row) + half + d, x.second);
            });
            std::fill_n(words(row) + a.head_dim, padded - a.head_dim, 0.0f);
            out.values[j / PER_WORD<C>] = row;
        }
    }
}

// Two integers of 8 bits that are 4-bit integers less their zeros; words of two such.
inline uint16_t less(uint16_t integers, uint16_t zeros) { return ((integers | 0x8080) - zeros) ^ 0x8080; }

// Keys' pairs as words, n neighbours of them.
inline void widen_keys(const int4_pair* __restrict from, const uint16_t* __restrict zeros, int n,
                       uint16_t* __restrict to) {
    for (int i = 0; i < n; ++i) to[i] = less((from[i].both | from[i].both << 4) & 0x0f0f, zeros[i]);
}

// Two tokens' pairs of values [half] as words, those of first elements and those of second.
inline void widen_values(const int4_pair* __restrict from, const int4_pair* __restrict next, uint16_t zeros, int half,
                         uint16_t* __restrict first, uint16_t* __restrict second) {
    for (int d = 0; d < half; ++d) {
        uint16_t a = from[d].both, b = next[d].both;
        first[d] = less((a & 15) | (b & 15) << 8, zeros);
        second[d] = less(a >> 4 | (b & 0xf0) << 4, zeros);
    }
}

// Operands of 4-bit integers less their zeros, in working memory.
inline void widen(const Attention& a, const Tile& tile, const int4_pair*, int8_t* keys, int8_t* values,
                  Operands<int8_t>& out) {
    const int half = a.head_dim / 2, padded = a.padded_dim();
    auto words = [](int8_t* to) { return reinterpret_cast<uint16_t*>(to); };
    out.key_stride = TILE;
    for (int v = 0; v < TILE / W; ++v) out.keys[v] = keys + v * W * 2;
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        uint16_t zeros[TILE];
        for (int key = 0; key < part.count; ++key) zeros[key] = zero_of(part.key_scales[key]) * 0x0101;
        auto* from = reinterpret_cast<const int4_pair*>(part.keys);
        for (int pair = 0; pair < half; ++pair, from += a.block_size)
            widen_keys(from, zeros, part.count, words(keys) + pair * TILE + part.first);
        from = reinterpret_cast<const int4_pair*>(part.values);
        for (int j = 0; j < part.count; j += 2, from += a.head_dim) {
            uint16_t both = zero_of(part.value_scales[j]) | zero_of(part.value_scales[j + 1]) << 8;
            int8_t* row = values + size_t(part.first + j) * padded;
            widen_values(from, from + half, both, half, words(row), words(row) + half);
            std::fill_n(words(row) + a.head_dim, padded - a.head_dim, uint16_t{});
            out.values[(part.first + j) / 2] = row;
        }
    }
}

// A tile's scales, side by side.
inline void gather_scales(const Tile& tile, float* key_scales, float* value_scales) {
    for (int i = 0; i < tile.n_parts; ++i) {
        const Part& part = tile.parts[i];
        std::copy_n(part.key_scales, part.count, key_scales + part.first);
        std::copy_n(part.value_scales, part.count, value_scales + part.first);
    }
}

}  // namespace
