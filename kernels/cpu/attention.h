// Paged causal attention of ragged queries.
//
// A *line* is one query head of one query token: the unit whose bits are promised. Lines that share a KV head are
// worked in groups of up to LINES, so that each key and value is fetched once for all of them: the lines
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

#include "attention_tiles.h"
#include "attention_work.h"

namespace {

// Vectors to keep in registers per line when `lines` lines are blocked together: a power of two.
constexpr int vectors_for(int lines) {
    int fit = (REGISTERS - 4) / lines;
    return std::min(fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1, TILE / W);
}

// The keys [begin, end) of a tile that a line attends to, relative to the tile.
struct Range {
    int begin, end;
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
        return size_t(LINES) * a.head_dim + size_t(TILE) * (a.head_dim + a.padded_dim() + LINES) +
               2 * Partial::size(a, LINES);
    }
    Scratch(const Attention& a, float* memory)
        : queries(memory),
          keys(queries + LINES * a.head_dim),
          values(keys + TILE * a.head_dim),
          scores(values + TILE * a.padded_dim()),
          split(scores + LINES * TILE, LINES),
          total(split.values + LINES * a.padded_dim(), LINES) {}
};

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
        // A thread knows its next work before it does the current one, whose end fetches the beginning of the next.
        for (size_t current = omp_get_thread_num(), next; current < n; current = next) {
            next = omp_get_num_threads() + unclaimed++;
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
