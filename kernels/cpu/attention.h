// Paged causal attention of ragged queries.
//
// A *line* is one query head of one query token: the unit whose bits are promised. Lines that share a KV head are
// worked in groups, so that each key and value is fetched once for all of them: the lines of one row (its query heads x
// its query tokens, token-major), or those of neighbouring rows of one token each whose block tables begin alike, which
// meet the tiles that they share together and then each row its own. Where a row has few tokens, its KV heads take turns
// at each tile, for memory is read the faster the longer it is read in order. Keys come in tiles of TILE; SPLIT keys
// make a softmax of their own, and the splits of a line are merged in ascending order, by however many threads computed.
// A line meets its tiles in the order of their keys, whoever meets them with it.
//
// The cache is laid out as kv_cache.h says. Queries and probabilities are rounded to its type; all sums are fp32. Where
// it holds small numbers, a key's scale is applied to its scores and a value's to its probabilities. 8-bit floats become
// the queries' type, exactly, when a tile is met. Integers are multiplied as such: a line's query, and its probabilities
// in a tile, are rounded to int16 with a scale, and sums over a key and over a tile are exact, so that it does not matter
// in which parts a tile's keys are added.
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

// How a cache of C is multiplied: what queries and probabilities become, and what their products are summed in.
template <class C>
struct Multiplied {
    using Factor = C;
    using Sum = float;
    using Sums = vec;
};
template <>
struct Multiplied<int8_t> {
    using Factor = int16_t;
    using Sum = int32_t;
    using Sums = ivec;
};
template <class C>
using Factor = typename Multiplied<C>::Factor;
template <class C>
using Sum = typename Multiplied<C>::Sum;
template <class C>
using Sums = typename Multiplied<C>::Sums;

template <class C>
constexpr bool IS_INTEGER = std::is_same<C, int8_t>::value;
constexpr int LARGEST_FACTOR = 32767;
static_assert(int64_t(LARGEST_FACTOR) * 127 * std::max(MAX_HEAD_DIM, TILE) < INT32_MAX, "");

inline vec as_float(vec x) { return x; }
inline vec as_float(ivec x) { return __builtin_convertvector(x, vec); }

// The keys [begin, end) of a tile that a line attends to, relative to the tile.
struct Range {
    int begin, end;

    bool holds(int i) const { return begin <= i && i + W <= end; }  // all of the W keys from i on
    ivec mask(int i) const {                                        // which of them
        ivec lane;
        for (int k = 0; k < W; ++k) lane[k] = k;
        ivec key = lane + i;
        return (key >= begin) & (key < end);
    }
};

// One thread's working memory; `ranges` belong to the current tile.
template <class C>
struct Scratch {
    float* scores;                     // [BLOCKED_LINES, TILE]
    Factor<C>* probabilities;          // [BLOCKED_LINES, TILE]
    Factor<C>* queries;                // [LINES, head_dim]
    C* keys;                           // [head_dim / P, TILE, P]
    C* values;                         // [TILE / P, padded_dim, P]
    int32_t* sums;                     // of a tile's integers: [BLOCKED_LINES, padded_dim]
    float *key_scales, *value_scales;  // [TILE]; nullptr: there are none
    Partial split, total;
    Range ranges[LINES];
    float query_scales[LINES];                // 1 of floats
    float probability_scales[BLOCKED_LINES];  // of integers

    static size_t size(const Attention& a) {
        return size_t(2 * BLOCKED_LINES + a.head_dim + a.padded_dim() + 2) * TILE + size_t(LINES) * a.head_dim +
               size_t(BLOCKED_LINES) * a.padded_dim() + 2 * Partial::size(a, LINES);
    }
    Scratch(const Attention& a, float* memory)
        : scores(memory),
          probabilities(reinterpret_cast<Factor<C>*>(memory += BLOCKED_LINES * TILE)),
          queries(reinterpret_cast<Factor<C>*>(memory += BLOCKED_LINES * TILE)),
          keys(reinterpret_cast<C*>(memory += LINES * a.head_dim)),
          values(reinterpret_cast<C*>(memory += TILE * a.head_dim)),
          sums(reinterpret_cast<int32_t*>(memory += TILE * a.padded_dim())),
          key_scales(memory += BLOCKED_LINES * a.padded_dim()),
          value_scales(memory += TILE),
          split(memory += TILE, LINES),
          total(split.values + LINES * a.padded_dim(), LINES) {}
};

// scores[r][key] = query r . key, for R lines and the vectors of keys [begin, end) of a tile.
template <int R, class C, class Ahead>
void score(const Attention& a, const Factor<C>* queries, const Operands<C>& tile, int begin, int end, float* scores,
           Ahead ahead) {
    constexpr int N = vectors_for(R), P = PER_WORD<C>;
    for (int group = begin / N * N; group < end; group += N) {
        const C* keys[N];
        std::copy_n(tile.keys + group, N, keys);
        Sums<C> total[R][N] = {};
        for (int word = 0; word < a.head_dim / P; ++word) {
            ahead.inner();
            ivec key[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) key[n] = load_words(keys[n] + size_t(word) * tile.key_stride * P);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                ivec query = splat_word(queries + r * a.head_dim + word * P);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) total[r][n] = dot<C>(query, key[n], total[r][n]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(scores + r * TILE + (group + n) * W, as_float(total[r][n]));
    }
}

// sums[r] += probabilities[r][key] * value[key] over a range of whole words of keys, for R lines and N vectors from
// `column` on.
template <int R, int N, class C, class Ahead>
inline void add_columns(const Factor<C>* probabilities, const C* const* values, int column, int stride, Range words,
                        Sum<C>* sums, Ahead ahead) {
    constexpr int P = PER_WORD<C>;
    Sums<C> total[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[r][n] = load(sums + r * stride + column + n * W);
    for (int word = words.begin; word < words.end; ++word) {
        ahead.inner();
        const C* row = values[word] + column * P;
        ivec value[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) value[n] = load_words(row + n * W * P);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            ivec p = splat_word(probabilities + r * TILE + word * P);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) total[r][n] = dot<C>(p, value[n], total[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + r * stride + column + n * W, total[r][n]);
}

template <int R, class C, class Ahead>
void add_words(const Factor<C>* probabilities, const C* const* values, int stride, Range words, Sum<C>* sums,
               Ahead ahead) {
    if (words.begin >= words.end) return;
    constexpr int N = vectors_for(R);
    int column = 0;
    for (; column + N * W <= stride; column += N * W)
        add_columns<R, N>(probabilities, values, column, stride, words, sums, ahead);
    for (; column < stride; column += W) add_columns<R, 1>(probabilities, values, column, stride, words, sums, ahead);
}

// One line's share of a word whose other keys are not in its range and may be anything.
template <class C, class Ahead>
void add_part(const C* probabilities, const C* const* values, int stride, int word, bool first, float* sums,
              Ahead ahead) {
    alignas(64) uint32_t kept[round_up(MAX_HEAD_DIM, W)];
    std::memcpy(kept, values[word], stride * sizeof *kept);
    for (int i = 0; i < stride; ++i) kept[i] &= first ? 0xffff : 0xffff0000;
    const C* row = reinterpret_cast<const C*>(kept);
    add_words<1>(probabilities + word * PER_WORD<C>, &row, stride, {0, 1}, sums, ahead);
}

// One line's share of a range of keys. The probabilities of others are zero, which integers need no more than.
template <class C, class Ahead>
void add_keys(const Factor<C>* probabilities, const C* const* values, int stride, Range keys, Sum<C>* sums,
              Ahead ahead) {
    constexpr int P = PER_WORD<C>;
    if (keys.begin >= keys.end) return;
    if constexpr (IS_INTEGER<C>) {
        add_words<1>(probabilities, values, stride, {keys.begin / P, round_up(keys.end, P) / P}, sums, ahead);
    } else {
        int begin = round_up(keys.begin, P) / P, end = keys.end / P;
        if (keys.begin % P) add_part(probabilities, values, stride, begin - 1, false, sums, ahead);
        add_words<1>(probabilities, values, stride, {begin, end}, sums, ahead);
        if (keys.end % P) add_part(probabilities, values, stride, end, true, sums, ahead);
    }
}

// Scales one line's scores, gives them their cap and -inf outside of the line's range; returns the largest.
template <class Ahead>
float scale_scores(const Attention& a, float* scores, float scale, const float* key_scales, Range keys, Ahead ahead) {
    vec best = splat(-INF);
    for (int i = keys.begin / W * W; i < keys.end; i += W) {
        ahead.inner();
        vec x = load(scores + i) * scale;
        if (key_scales) x *= load(key_scales + i);
        if (a.softcap != 0) x = a.softcap * tanh(x / a.softcap);
        if (!keys.holds(i)) x = keys.mask(i) ? x : splat(-INF);
        store(scores + i, x);
        best = max(x, best);
    }
    return largest(best);
}

// The probabilities of one line, which stand in its scores, become integers; returns their scale.
inline float round_probabilities(Scratch<int8_t>& s, int r, Range keys) {
    int begin = keys.begin / W * W, count = round_up(keys.end, W) - begin;
    if (keys.begin >= keys.end) return 0;
    const float* p = s.scores + r * TILE + begin;
    Scale scale = scale_of(p, count, LARGEST_FACTOR);
    for (int i = 0; i < count; i += W)
        store(s.probabilities + r * TILE + begin + i, load(p + i) * scale.inverse);
    return scale.value;
}

// Turns scores of lines [line, line + R) into probabilities relative to their running maxima, and moves their state to
// those. The state of a line that sees no key here does not change: its decay is exactly 1, or it was empty.
template <int R, class C, class Ahead>
void soften(const Attention& a, Scratch<C>& s, Partial& state, int line, Ahead ahead) {
    constexpr int LANES = round_up(R, W);  // a lane is a line
    alignas(64) float maximum[LANES] = {}, old[LANES] = {}, base[LANES], decay[LANES], total[R];
    for (int r = 0; r < R; ++r) {
        old[r] = state.maximum[line + r];
        float scale = a.scale * s.query_scales[line + r];
        float best = scale_scores(a, s.scores + r * TILE, scale, s.key_scales, s.ranges[line + r], ahead);
        maximum[r] = std::max(old[r], best);
    }
    for (int i = 0; i < R; i += W) {
        vec most = load(maximum + i), from = most == -INF ? vec{} : most;  // all scores -inf: no NaN, but zeros
        store(base + i, from);
        store(decay + i, exp(load(old + i) - from));
    }
    for (int r = 0; r < R; ++r) {
        Range keys = s.ranges[line + r];
        vec sums{};
        for (int i = keys.begin / W * W; i < keys.end; i += W) {
            ahead.inner();
            vec p = exp_as<C>(load(s.scores + r * TILE + i) - base[r]);
            sums += p;
            if (s.value_scales) {
                p *= load(s.value_scales + i);
                if (!keys.holds(i)) p = keys.mask(i) ? p : vec{};  // what is no key's scale may be anything
            }
            if constexpr (IS_INTEGER<C>)
                store(s.scores + r * TILE + i, p);
            else
                store(s.probabilities + r * TILE + i, p);
        }
        if constexpr (IS_INTEGER<C>) s.probability_scales[r] = round_probabilities(s, r, keys);
        total[r] = sum(sums);
    }
    for (int r = 0; r < R; ++r) {
        float* values = state.values + size_t(line + r) * a.padded_dim();
        if (decay[r] != 1.0f)
            for (int d = 0; d < a.padded_dim(); d += W) store(values + d, load(values + d) * decay[r]);
        state.sum[line + r] = state.sum[line + r] * decay[r] + total[r];
        state.maximum[line + r] = maximum[r];
    }
}

// values[d] += scale * sums[d], n of them.
inline void add_sums(const int32_t* sums, int n, float scale, float* values) {
    for (int d = 0; d < n; d += W) store(values + d, fma(as_float(load(sums + d)), splat(scale), load(values + d)));
}

// Lines [line, line + R) against one tile. Where their causal or window edges differ, the keys that all of them see are
// added together and the rest line by line: a key outside of a line's range never touches its state.
template <int R, class C, class Ahead>
void attend(const Attention& a, Scratch<C>& s, const Operands<C>& tile, Partial& state, int line, Ahead ahead) {
    ahead.outer();
    constexpr int P = PER_WORD<C>;
    int padded = a.padded_dim();
    const Range* ranges = s.ranges + line;
    float* values = state.values + size_t(line) * padded;
    Range any{TILE, 0}, all{0, TILE};
    for (int r = 0; r < R; ++r) {
        Range own = ranges[r];
        if (own.begin < own.end) any = {std::min(any.begin, own.begin), std::max(any.end, own.end)};
        all = {std::max(all.begin, own.begin), std::min(all.end, own.end)};
    }
    if (any.begin >= any.end) return;
    all = {round_up(all.begin, P), all.end / P * P};
    if (all.begin >= all.end) all = {TILE, TILE};
    score<R>(a, s.queries + line * a.head_dim, tile, any.begin / W, (any.end + W - 1) / W, s.scores, ahead);
    soften<R>(a, s, state, line, ahead);
    Sum<C>* sums;
    if constexpr (IS_INTEGER<C>)
        std::fill_n(sums = s.sums, R * padded, 0);
    else
        sums = values;
    auto add_own = [&](int r, Range keys) {
        add_keys(s.probabilities + r * TILE, tile.values, padded, keys, sums + r * padded, ahead);
    };
    for (int r = 0; r < R; ++r) add_own(r, {ranges[r].begin, std::min(all.begin, ranges[r].end)});
    add_words<R>(s.probabilities, tile.values, padded, {all.begin / P, all.end / P}, sums, ahead);
    for (int r = 0; r < R; ++r) add_own(r, {all.end, ranges[r].end});
    if constexpr (IS_INTEGER<C>)
        for (int r = 0; r < R; ++r)
            if (ranges[r].begin < ranges[r].end)
                add_sums(sums + r * padded, padded, s.probability_scales[r], values + r * padded);
}

// A visit's lines against its tile.
template <class C, class Ahead>
void attend_all(const Attention& a, Scratch<C>& s, const Operands<C>& tile, Partial& state, const Visit& visit,
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
template <class C>
int inner_steps(const Attention& a, const Tile& tile, int lines) {
    int keys = tile.end - tile.begin, width = vectors_for(lines) * W;
    int words = ((keys + width - 1) / width * a.head_dim + a.padded_dim() / width * keys) / PER_WORD<C>;
    return words + 2 * lines * (keys / W) + 1;
}

// One visit to a tile of S, while `next` is fetched.
template <class S, class C>
void attend_tile(const Attention& a, const Lines& lines, const Visit& visit, const Tile& tile, const Tile* next,
                 Scratch<C>& s, Partial& state) {
    for (int i = visit.begin; i < visit.end;) {
        int position = lines.position(a, i), end = std::min(i + lines.rest_of_token(a, i), visit.end);
        Range range{std::max(a.first_key(position) - visit.first_key, 0),
                    std::min(position + 1 - visit.first_key, TILE)};
        while (i < end) s.ranges[i++] = range;
    }
    Operands<C> operands;
    if constexpr (LARGEST<S> != 0) gather_scales(tile, s.key_scales, s.value_scales);
    if constexpr (IN_PAIRS<S>)
        widen(a, tile, static_cast<const S*>(nullptr), s.keys, s.values, operands);
    else if (a.head_dim % W == 0 && a.block_size % W == 0)
        use_in_place(a, tile, operands);
    else
        copy(a, tile, s.keys, s.values, operands);
    int count = visit.end - visit.begin, rows = key_rows<S>(a);
    if (count <= BLOCKED_LINES) {
        Prefetch ahead(next, rows, IN_ROW<S>, a.block_size, inner_steps<C>(a, tile, count));
        attend_all(a, s, operands, state, visit, InnerAhead{ahead});
    } else {
        Prefetch ahead(next, rows, IN_ROW<S>, a.block_size, (count + BLOCKED_LINES - 1) / BLOCKED_LINES);
        attend_all(a, s, operands, state, visit, OuterAhead{ahead});
    }
}

// A split of some lines; none: no lines.
struct Place {
    const Lines* lines;
    int split;
};

// The softmax state of `lines` over one split's keys, from nothing; the first tile of `after` is fetched at the end.
template <class S, class C>
void attend_split(const Attention& a, Cache<S> cache, const Lines& lines, int split, Place after,
                  Scratch<C>& s, Partial& state) {
    state.clear(a, lines.count());
    Visit visit = lines.first_visit(a, split), next = visit;
    Tile tiles[2];
    locate<C>(a, cache, lines, visit, tiles[0]);
    for (int turn = 0;; visit = next, turn ^= 1) {
        bool more = lines.advance(a, split, next), fetch = more || after.lines;
        if (more)
            locate<C>(a, cache, lines, next, tiles[turn ^ 1]);
        else if (after.lines)
            locate<C>(a, cache, *after.lines, after.lines->first_visit(a, after.split), tiles[turn ^ 1]);
        attend_tile<S>(a, lines, visit, tiles[turn], fetch ? &tiles[turn ^ 1] : nullptr, s, state);
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

template <class Q, class C>
void load_queries(const Attention& a, const Lines& lines, const Q* q, Scratch<C>& s) {
    for (int i = 0; i < lines.count(); ++i) {
        const Q* from = q + lines.offset(a, i);
        Scale scale = IS_INTEGER<C> ? scale_of(from, a.head_dim, LARGEST_FACTOR) : Scale{1, 1};
        s.query_scales[i] = scale.value;
        for_each_vec(a.head_dim, [&, to = s.queries + i * a.head_dim](int d, auto get, auto put) {
            put(to + d, IS_INTEGER<C> ? get(from + d) * scale.inverse : get(from + d));
        });
    }
}

template <class Q>
void store_result(const Attention& a, const Lines& lines, const Partial& state, Q* out) {
    for (int i = 0; i < lines.count(); ++i)
        for_each_vec(a.head_dim, [&, from = state.values + size_t(i) * a.padded_dim(), to = out + lines.offset(a, i)](
                                     int d, auto get, auto put) { put(to + d, get(from + d) / state.sum[i]); });
}

template <class Q, class S, class C>
void do_work(const Attention& a, const Work& work, const Work* next, const Q* q, Cache<S> cache, Q* out, Scratch<C>& s) {
    const Lines& lines = *work.lines;
    load_queries(a, lines, q, s);
    s.total.clear(a, lines.count());
    for (int split = work.split_begin; split < work.split_end; ++split) {
        Place after = split + 1 < work.split_end ? Place{&lines, split + 1}
                      : next                     ? Place{next->lines, next->split_begin}
                                                 : Place{nullptr, 0};
        Partial state = work.partial ? Partial(work.partial, lines.count()) : s.split;
        attend_split(a, cache, lines, split, after, s, state);
        if (!work.partial) merge(a, state, s.total, lines.count());
    }
    if (!work.partial) store_result(a, lines, s.total, out);
}

template <class Q, class C>
void merge_divided(const Attention& a, const Work& work, Q* out, Scratch<C>& s) {
    const Lines& lines = *work.lines;
    s.total.clear(a, lines.count());
    for (int i = 0; i < work.split_end - work.split_begin; ++i)
        merge(a, Partial(work.partial + i * Partial::size(a, lines.count()), lines.count()), s.total, lines.count());
    store_result(a, lines, s.total, out);
}

template <class Q, class S>
void attention(const Attention& a, const Q* q, Cache<S> cache, Q* out) {
    using C = std::conditional_t<std::is_same<S, fp8_pair>::value, Q,  // what is multiplied
                                 std::conditional_t<std::is_same<S, int4_pair>::value, int8_t, S>>;
    Plan plan = make_plan(a);
    size_t n = plan.work.size();
    std::atomic<size_t> unclaimed{0};
    float* memory = scratch_floats(Scratch<C>::size(a) * a.threads);
#pragma omp parallel num_threads(a.threads) if (n > 1)
    {
        Scratch<C> scratch(a, memory + omp_get_thread_num() * Scratch<C>::size(a));
        if (LARGEST<S> == 0) scratch.key_scales = scratch.value_scales = nullptr;
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
