// Paged causal attention of ragged queries.
//
// A *line* is one query head of one query token: the unit whose bits are promised. Lines that share a KV head are
// worked in groups of up to LINES, so that each key and value is fetched and unpacked once for all of them: the lines
// of one row (its query heads x its query tokens, token-major), or those of neighbouring rows of one token each whose
// block tables begin alike, which meet the tiles that they share together and then each row its own. Keys come in tiles
// of TILE; SPLIT keys make a softmax of their own, and the splits of a line are merged in ascending order, by however
// many threads computed. A line meets its tiles in the order of their keys, whoever meets them with it.
//
// The cache holds the values of a block and KV head as [block_size, head_dim], and its keys transposed, as
// [head_dim, block_size]: neighbouring keys fill a vector as they lie.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "vectors.h"

namespace {

constexpr int TILE = 64, SPLIT = 512, LINES = 96, BLOCKED_LINES = 6;
static_assert(SPLIT % TILE == 0 && TILE % W == 0 && LINES % BLOCKED_LINES == 0, "");

// Vectors to keep in registers per line when `lines` lines are blocked together: a power of two.
constexpr int vectors_for(int lines) {
    int fit = (REGISTERS - 4) / lines;
    return std::min(fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1, TILE / W);
}

struct Attention {
    const int32_t *cu_q, *kv_len, *block_table;
    int64_t tokens, n_blocks, page;  // page: elements from one block's head to the next in the cache
    int rows, table_width, q_heads, kv_heads, head_dim, block_size, window, threads;  // window 0: none
    float scale, softcap;                                                             // softcap 0: none

    int group() const { return q_heads / kv_heads; }
    int padded_dim() const { return round_up(head_dim, W); }
    int first_key(int position) const { return window ? std::max(0, position - window + 1) : 0; }
};

// Lines [begin, end) of some Lines, which meet the tile at `first_key` of `row`'s keys.
struct Visit {
    int row, first_key, begin, end;
};

// Up to LINES lines of one KV head: of one row, or of `rows` neighbours with one query each that share their keys below
// `shared`.
struct Lines {
    int row, rows, kv_head, first, count;
    int key_begin, key_end;  // the keys that any of them attends to
    int shared;              // a multiple of TILE; 0 where there is one row

    int split_begin() const { return key_begin / SPLIT; }
    int split_end() const { return (key_end + SPLIT - 1) / SPLIT; }
    // Where the first tile of a split starts.
    int first_key(int split) const { return std::max(split * SPLIT, key_begin / TILE * TILE); }

    int position(const Attention& a, int line) const {
        if (rows > 1) return a.kv_len[row + line / a.group()] - 1;
        return a.kv_len[row] - (a.cu_q[row + 1] - a.cu_q[row]) + (first + line) / a.group();
    }
    // Where the line's vector lies in a [tokens, q_heads, head_dim] tensor.
    int64_t offset(const Attention& a, int line) const {
        int token = a.cu_q[row] + (first + line) / a.group(), head = kv_head * a.group() + (first + line) % a.group();
        return (int64_t(token) * a.q_heads + head) * a.head_dim;
    }

    // The end of the keys of a visit's tile that its lines may attend to.
    int end_of(const Attention& a, const Visit& v) const {
        if (rows == 1) return key_end;
        return v.first_key < shared ? shared : a.kv_len[v.row];
    }
    Visit first_visit(const Attention& a, int split) const {
        int key = first_key(split);
        return rows == 1 || key < shared ? Visit{row, key, 0, count} : own_visit(a, split, row);
    }
    // Moves on to the next tile of a split; false: there is none.
    bool advance(const Attention& a, int split, Visit& v) const {
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
        int line = (member - row) * a.group();
        return {member, key, line, line + a.group()};
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

// The keys [begin, end) of a tile that a line attends to, relative to the tile.
struct Range {
    int begin, end;
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

// Where a prefetch advances: in the inner loops of few lines, which wait for memory, after every few keys or elements
// (a head_dim is a multiple of 8)...
struct InnerAhead {
    static constexpr int EVERY = 4;
    Prefetch& prefetch;
    void inner() { prefetch.advance(); }
    void outer() {}
};
// ... or before each of many blocks of lines, whose inner loops are the faster for having nothing else to do.
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

// One thread's working memory; `ranges` belong to the current tile.
struct Scratch {
    float* queries;  // [LINES, head_dim]
    float* keys;     // [head_dim, TILE]
    float* values;   // [TILE, padded_dim]
    float* scores;   // [LINES, TILE]: then probabilities
    Partial split, total;
    Range ranges[LINES];

    static size_t size(const Attention& a) {
        return size_t(LINES) * round_up(a.head_dim, 16) + size_t(TILE) * (a.head_dim + a.padded_dim() + LINES) +
               2 * Partial::size(a, LINES);
    }
    Scratch(const Attention& a, float* memory)
        : queries(memory),
          keys(queries + LINES * round_up(a.head_dim, 16)),
          values(keys + TILE * a.head_dim),
          scores(values + TILE * a.padded_dim()),
          split(scores + LINES * TILE, LINES),
          total(split.values + LINES * a.padded_dim(), LINES) {}
};

template <class C>
struct Cache {
    const C *keys, *values;
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

// scores[r][key] = query r . key, for R lines and the vectors of keys [begin, end) of a tile.
template <int R, class K, class Ahead>
void score(const float* queries, const K* const* keys, int stride, int dim, int begin, int end, float* scores,
           Ahead ahead) {
    constexpr int N = vectors_for(R);
    for (int group = begin / N * N; group < end; group += N) {
        const K* k[N];
        std::copy_n(keys + group, N, k);
        vec dot[R][N] = {};
        for (int d = 0; d < dim;) {
            ahead.inner();
#pragma GCC unroll 4
            for (int i = 0; i < Ahead::EVERY; ++i, ++d) {
                vec key[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) key[n] = load(k[n] + size_t(d) * stride);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    vec query = splat(queries[r * dim + d]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) dot[r][n] = fma(query, key[n], dot[r][n]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(scores + r * TILE + (group + n) * W, dot[r][n]);
    }
}

// sums[r] += probabilities[r][key] * value[key] over a range of keys, for R lines and N vectors from `column` on.
template <int R, int N, class V, class Ahead>
inline void add_columns(const float* probabilities, const V* const* values, int column, int stride, Range keys,
                        float* sums, Ahead ahead) {
    vec total[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[r][n] = load(sums + r * stride + column + n * W);
    auto add = [&](int key) {
        const V* row = values[key] + column;
        vec value[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) value[n] = load(row + n * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            vec p = splat(probabilities[r * TILE + key]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) total[r][n] = fma(p, value[n], total[r][n]);
        }
    };
    int key = keys.begin;
    while (key + Ahead::EVERY <= keys.end) {
        ahead.inner();
#pragma GCC unroll 4
        for (int i = 0; i < Ahead::EVERY; ++i) add(key++);
    }
    while (key < keys.end) add(key++);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + r * stride + column + n * W, total[r][n]);
}

template <int R, class V, class Ahead>
void add_values(const float* probabilities, const V* const* values, int stride, Range keys, float* sums,
                Ahead ahead) {
    if (keys.begin >= keys.end) return;
    constexpr int N = vectors_for(R);
    int column = 0;
    for (; column + N * W <= stride; column += N * W)
        add_columns<R, N>(probabilities, values, column, stride, keys, sums, ahead);
    for (; column < stride; column += W) add_columns<R, 1>(probabilities, values, column, stride, keys, sums, ahead);
}

// Turns one line's scores into probabilities relative to its running maximum, and moves its state to that maximum.
void soften(const Attention& a, float* scores, Range keys, Partial& state, int line) {
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    int first = keys.begin / W * W;
    vec best = splat(-INF);
    for (int i = first; i < keys.end; i += W) {
        vec x = load(scores + i) * a.scale;
        if (a.softcap != 0) x = a.softcap * tanh(x / a.softcap);
        ivec key = lane + i;
        x = ((key >= keys.begin) & (key < keys.end)) ? x : splat(-INF);
        store(scores + i, x);
        best = max(x, best);
    }
    float maximum = std::max(state.maximum[line], largest(best));
    float base = maximum == -INF ? 0.0f : maximum;  // all scores -inf: probabilities of 0, not NaN
    vec total{};
    for (int i = first; i < keys.end; i += W) {
        vec p = exp(load(scores + i) - base);
        store(scores + i, p);
        total += p;
    }
    float decay = exp(state.maximum[line] - base);
    if (decay != 1.0f) {
        float* values = state.values + size_t(line) * a.padded_dim();
        for (int d = 0; d < a.padded_dim(); d += W) store(values + d, load(values + d) * decay);
    }
    state.sum[line] = state.sum[line] * decay + sum(total);
    state.maximum[line] = maximum;
}

// Lines [line, line + R) against one tile. Where their causal or window edges differ, the keys that all of them see are
// added together and the rest line by line: a key outside of a line's range never touches its state.
template <int R, class K, class V, class Ahead>
void attend(const Attention& a, const Scratch& s, const Operands<K, V>& tile, Partial& state, int line, Ahead ahead) {
    ahead.outer();
    int dim = a.head_dim, padded = a.padded_dim();
    const Range* ranges = s.ranges + line;
    float* scores = s.scores + line * TILE;
    float* values = state.values + size_t(line) * padded;
    Range any{TILE, 0}, all{0, TILE};
    for (int r = 0; r < R; ++r) {
        Range own = ranges[r];
        if (own.begin < own.end) any = {std::min(any.begin, own.begin), std::max(any.end, own.end)};
        all = {std::max(all.begin, own.begin), std::min(all.end, own.end)};
    }
    if (any.begin >= any.end) return;
    if (all.begin >= all.end) all = {TILE, TILE};
    score<R>(s.queries + line * dim, tile.keys, tile.key_stride, dim, any.begin / W, (any.end + W - 1) / W, scores,
             ahead);
    for (int r = 0; r < R; ++r)
        if (ranges[r].begin < ranges[r].end) soften(a, scores + r * TILE, ranges[r], state, line + r);
    for (int r = 0; r < R; ++r) {
        Range before{ranges[r].begin, std::min(all.begin, ranges[r].end)};
        add_values<1>(scores + r * TILE, tile.values, padded, before, values + r * padded, ahead);
    }
    add_values<R>(scores, tile.values, padded, all, values, ahead);
    for (int r = 0; r < R; ++r) {
        Range after{all.end, ranges[r].end};
        add_values<1>(scores + r * TILE, tile.values, padded, after, values + r * padded, ahead);
    }
}

// A visit's lines against its tile.
template <class K, class V, class Ahead>
void attend_all(const Attention& a, const Scratch& s, const Operands<K, V>& tile, Partial& state, const Visit& visit,
                Ahead ahead) {
    int line = visit.begin;
    for (; line + BLOCKED_LINES <= visit.end; line += BLOCKED_LINES)
        attend<BLOCKED_LINES>(a, s, tile, state, line, ahead);
    static_assert(BLOCKED_LINES == 6, "the cases below are the remainders");
    switch (visit.end - line) {
        case 5: return attend<5>(a, s, tile, state, line, ahead);
        case 4: return attend<4>(a, s, tile, state, line, ahead);
        case 3: return attend<3>(a, s, tile, state, line, ahead);
        case 2: return attend<2>(a, s, tile, state, line, ahead);
        case 1: return attend<1>(a, s, tile, state, line, ahead);
    }
}

// How many inner steps it takes, about, that up to BLOCKED_LINES lines meet a tile.
int inner_steps(const Attention& a, const Tile& tile, int lines) {
    int keys = tile.end - tile.begin, width = vectors_for(lines) * W;
    return ((keys + width - 1) / width * a.head_dim + a.padded_dim() / width * keys) / InnerAhead::EVERY + 1;
}

// One visit, while `next` is fetched.
template <class C>
void attend_tile(const Attention& a, const Lines& lines, const Visit& visit, const Tile& tile, const Tile* next,
                 Scratch& s, Partial& state) {
    for (int i = visit.begin; i < visit.end; ++i) {
        int position = lines.position(a, i);
        s.ranges[i] = {std::max(a.first_key(position) - visit.first_key, 0),
                       std::min(position + 1 - visit.first_key, TILE)};
    }
    // Few lines read the cache where it lies, if whole vectors do; for many, keys lie closer and are converted but once.
    int count = visit.end - visit.begin;
    bool whole = a.head_dim % W == 0;
    if (count <= BLOCKED_LINES && whole && a.block_size % W == 0) {
        Prefetch ahead(next, a.head_dim, a.block_size, sizeof(C), inner_steps(a, tile, count));
        Operands<C, C> operands;
        use_keys(a, tile, operands);
        use_values(a, tile, operands);
        return attend_all(a, s, operands, state, visit, InnerAhead{ahead});
    }
    Prefetch ahead(next, a.head_dim, a.block_size, sizeof(C), (count + BLOCKED_LINES - 1) / BLOCKED_LINES);
    Operands<float, float> operands;
    copy_keys<C>(a, tile, s.keys, operands);
    if constexpr (std::is_same<C, float>::value)
        if (whole) {
            use_values(a, tile, operands);
            return attend_all(a, s, operands, state, visit, OuterAhead{ahead});
        }
    copy_values<C>(a, tile, s.values, operands);
    attend_all(a, s, operands, state, visit, OuterAhead{ahead});
}

// A split of some lines; none: no lines.
struct Place {
    const Lines* lines;
    int split;
};

// The softmax state of `lines` over one split's keys, from nothing; the first tile of `after` is fetched at the end.
template <class C>
void attend_split(const Attention& a, Cache<C> cache, const Lines& lines, int split, Place after, Scratch& s,
                  Partial& state) {
    state.clear(a, lines.count);
    Visit visit = lines.first_visit(a, split), next = visit;
    Tile tiles[2];
    locate(a, cache, lines, visit, tiles[0]);
    for (int turn = 0;; visit = next, turn ^= 1) {
        bool more = lines.advance(a, split, next), fetch = more || after.lines;
        if (more)
            locate(a, cache, lines, next, tiles[turn ^ 1]);
        else if (after.lines)
            locate(a, cache, *after.lines, after.lines->first_visit(a, after.split), tiles[turn ^ 1]);
        attend_tile<C>(a, lines, visit, tiles[turn], fetch ? &tiles[turn ^ 1] : nullptr, s, state);
        if (!more) return;
    }
}

void merge(const Attention& a, const Partial& from, Partial& into, int count) {
    int padded = a.padded_dim();
    for (int i = 0; i < count; ++i) {
        if (from.sum[i] == 0) continue;
        const float* added = from.values + size_t(i) * padded;
        float* values = into.values + size_t(i) * padded;
        if (into.sum[i] == 0) {
            into.maximum[i] = from.maximum[i];
            into.sum[i] = from.sum[i];
            std::copy_n(added, padded, values);
            continue;
        }
        float maximum = std::max(into.maximum[i], from.maximum[i]);
        float keep = exp(into.maximum[i] - maximum), take = exp(from.maximum[i] - maximum);
        for (int d = 0; d < padded; d += W)
            store(values + d, fma(load(added + d), splat(take), load(values + d) * keep));
        into.sum[i] = into.sum[i] * keep + from.sum[i] * take;
        into.maximum[i] = maximum;
    }
}

template <class Q>
void load_queries(const Attention& a, const Lines& lines, const Q* q, float* out) {
    for (int i = 0; i < lines.count; ++i)
        for_each_vec(a.head_dim, [&, from = q + lines.offset(a, i), to = out + i * a.head_dim](
                                     int d, auto get, auto put) { put(to + d, get(from + d)); });
}

template <class Q>
void store_result(const Attention& a, const Lines& lines, const Partial& state, Q* out) {
    for (int i = 0; i < lines.count; ++i)
        for_each_vec(a.head_dim, [&, from = state.values + size_t(i) * a.padded_dim(), to = out + lines.offset(a, i)](
                                     int d, auto get, auto put) { put(to + d, get(from + d) / state.sum[i]); });
}

// What one thread does at a time: all splits of some lines, or a single one of them that is kept in `partial`.
struct Work {
    const Lines* lines;
    int split_begin, split_end;
    float* partial;
    int64_t cost;
};

struct Plan {
    std::vector<Lines> lines;
    std::vector<Work> work;     // dearest first
    std::vector<Work> divided;  // lines whose splits are separate works, with the partial of the first split
    Floats partials;
};

// Keys, a multiple of TILE, that two rows have in the same blocks.
int shared_keys(const Attention& a, int one, int other) {
    const int32_t* x = a.block_table + int64_t(one) * a.table_width;
    const int32_t* y = a.block_table + int64_t(other) * a.table_width;
    int blocks = std::min(a.kv_len[one], a.kv_len[other]) / a.block_size, same = 0;
    while (same < blocks && x[same] == y[same]) ++same;
    return same * a.block_size / TILE * TILE;
}

// How many rows from `row` on are worked together, and the keys that they share.
struct Family {
    int rows, shared;
};

// A row joins while it saves more keys than the others then have to fetch for themselves.
Family family(const Attention& a, int row) {
    auto single = [&](int r) { return r < a.rows && a.cu_q[r + 1] - a.cu_q[r] == 1; };
    Family found{1, 0};
    if (a.window || !single(row)) return found;
    for (int next = row + 1; single(next) && (found.rows + 1) * a.group() <= LINES; ++next, ++found.rows) {
        int shared = shared_keys(a, row, next), lost = found.rows == 1 ? 0 : found.shared - shared;
        if (shared == 0 || shared <= lost * (found.rows - 1)) break;
        found.shared = found.rows == 1 ? shared : std::min(found.shared, shared);
    }
    return found;
}

std::vector<Lines> all_lines(const Attention& a) {
    std::vector<Lines> result;
    for (int row = 0, rows; row < a.rows; row += rows) {
        Family found = family(a, row);
        rows = found.rows;
        int all = (a.cu_q[row + rows] - a.cu_q[row]) * a.group();
        for (int head = 0; head < a.kv_heads; ++head)
            for (int first = 0; first < all; first += LINES) {
                Lines lines{row, rows, head, first, std::min(LINES, all - first), 0, 0, found.shared};
                lines.key_begin = a.first_key(lines.position(a, 0));
                for (int i = 0; i < lines.count; ++i)
                    lines.key_end = std::max(lines.key_end, lines.position(a, i) + 1);
                result.push_back(lines);
            }
    }
    return result;
}

// What some lines take, in units of one line meeting one key.
int64_t cost(const Attention& a, const Lines& lines) {
    constexpr int FETCH = 4;  // units that a key costs before any line meets it
    if (lines.rows == 1) return int64_t(lines.key_end - lines.key_begin) * (lines.count + FETCH);
    int64_t total = int64_t(lines.shared) * (lines.count + FETCH);
    for (int row = lines.row; row < lines.row + lines.rows; ++row)
        total += int64_t(a.kv_len[row] - lines.shared) * (a.group() + FETCH);
    return total;
}

// Lines that would keep one thread busy while the others have nothing left are worked split by split.
Plan make_plan(const Attention& a) {
    Plan plan;
    plan.lines = all_lines(a);
    int64_t total = 0;
    for (const Lines& lines : plan.lines) {
        plan.work.push_back({&lines, lines.split_begin(), lines.split_end(), nullptr, cost(a, lines)});
        total += plan.work.back().cost;
    }
    auto whole = std::partition(plan.work.begin(), plan.work.end(), [&](const Work& w) {
        return a.threads == 1 || w.cost <= total / (2 * a.threads) || w.split_end - w.split_begin == 1;
    });
    plan.divided.assign(whole, plan.work.end());
    plan.work.erase(whole, plan.work.end());
    size_t floats = 0;
    for (const Work& w : plan.divided) floats += (w.split_end - w.split_begin) * Partial::size(a, w.lines->count);
    plan.partials = make_floats(floats);
    float* next = plan.partials.get();
    for (Work& w : plan.divided) {
        w.partial = next;
        for (int i = w.split_begin; i < w.split_end; ++i, next += Partial::size(a, w.lines->count))
            plan.work.push_back({w.lines, i, i + 1, next, w.cost / (w.split_end - w.split_begin)});
    }
    std::stable_sort(plan.work.begin(), plan.work.end(), [](const Work& x, const Work& y) { return x.cost > y.cost; });
    return plan;
}

template <class Q, class C>
void do_work(const Attention& a, const Work& work, const Work* next, const Q* q, Cache<C> cache, Q* out, Scratch& s) {
    const Lines& lines = *work.lines;
    load_queries(a, lines, q, s.queries);
    s.total.clear(a, lines.count);
    for (int split = work.split_begin; split < work.split_end; ++split) {
        Place after = split + 1 < work.split_end ? Place{&lines, split + 1}
                      : next                     ? Place{next->lines, next->split_begin}
                                                 : Place{nullptr, 0};
        Partial state = work.partial ? Partial(work.partial, lines.count) : s.split;
        attend_split(a, cache, lines, split, after, s, state);
        if (!work.partial) merge(a, state, s.total, lines.count);
    }
    if (!work.partial) store_result(a, lines, s.total, out);
}

template <class Q>
void merge_divided(const Attention& a, const Work& work, Q* out, Scratch& s) {
    const Lines& lines = *work.lines;
    s.total.clear(a, lines.count);
    for (int i = 0; i < work.split_end - work.split_begin; ++i)
        merge(a, Partial(work.partial + i * Partial::size(a, lines.count), lines.count), s.total, lines.count);
    store_result(a, lines, s.total, out);
}

template <class Q, class C>
void attention(const Attention& a, const Q* q, Cache<C> cache, Q* out) {
    Plan plan = make_plan(a);
    size_t n = plan.work.size();
    std::atomic<size_t> unclaimed{0};
    float* memory = scratch_floats(Scratch::size(a) * a.threads);
#pragma omp parallel num_threads(a.threads) if (n > 1)
    {
        Scratch scratch(a, memory + omp_get_thread_num() * Scratch::size(a));
        // A thread claims its next work before it does the current one, whose end fetches the beginning of the next.
        for (size_t current = unclaimed++, next; current < n; current = next) {
            next = unclaimed++;
            do_work(a, plan.work[current], next < n ? &plan.work[next] : nullptr, q, cache, out, scratch);
        }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < plan.divided.size(); ++i) merge_divided(a, plan.divided[i], out, scratch);
    }
    int64_t done = int64_t(a.cu_q[a.rows]) * a.q_heads * a.head_dim;
    std::memset(static_cast<void*>(out + done), 0, (a.tokens * a.q_heads * a.head_dim - done) * sizeof(Q));
}

const char* check_attention(const Attention& a) {
    if (a.cu_q[0] != 0) return refuse("cu_q starts at %d, not at 0", a.cu_q[0]);
    for (int row = 0; row < a.rows; ++row) {
        int n = a.cu_q[row + 1] - a.cu_q[row], keys = a.kv_len[row];
        if (n < 0 || a.cu_q[row + 1] > a.tokens)
            return refuse("cu_q[%d] is %d after %d, with %lld query tokens", row + 1, a.cu_q[row + 1], a.cu_q[row],
                          (long long)a.tokens);
        if (n > keys || keys > int64_t(a.table_width) * a.block_size)
            return refuse("row %d has kv_len %d, with %d query tokens and room for %lld in its block table", row, keys,
                          n, (long long)a.table_width * a.block_size);
        if (n == 0) continue;
        const int32_t* table = a.block_table + int64_t(row) * a.table_width;
        for (int i = a.first_key(keys - n) / a.block_size; i * a.block_size < keys; ++i)
            if (table[i] < 0 || table[i] >= a.n_blocks)
                return refuse("row %d has block %d at %d of its block table, outside of [0, %lld)", row, table[i], i,
                              (long long)a.n_blocks);
    }
    return nullptr;
}

}  // namespace
