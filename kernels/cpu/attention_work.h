// How attention is divided among threads, and which rows are worked together.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_lines.h"

namespace {

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

// A row of so many lines joins while it saves more keys than the others then have to fetch for themselves.
Family family(const Attention& a, int row, int lines) {
    auto single = [&](int r) { return r < a.rows && a.cu_q[r + 1] - a.cu_q[r] == 1; };
    Family found{1, 0};
    if (a.window || !single(row)) return found;
    for (int next = row + 1; single(next) && (found.rows + 1) * lines <= LINES; ++next, ++found.rows) {
        int shared = shared_keys(a, row, next), lost = found.rows == 1 ? 0 : found.shared - shared;
        if (shared == 0 || shared <= lost * (found.rows - 1)) break;
        found.shared = found.rows == 1 ? shared : std::min(found.shared, shared);
    }
    return found;
}

// KV heads whose lines are worked together where a row has few queries: all, if those lines are few enough and there is
// other work for every thread, for their keys and values of a block follow one another in the cache.
int heads_together(const Attention& a) {
    constexpr int PLENTY = 8;  // rows of a thread
    if (a.rows < PLENTY * a.threads) return 1;
    return std::clamp(LINES / a.group, 1, a.kv_heads);
}

std::vector<Lines> all_lines(const Attention& a) {
    std::vector<Lines> result;
    int together = heads_together(a);
    for (int row = 0, rows; row < a.rows; row += rows) {
        Family found = family(a, row, together * a.group);
        rows = found.rows;
        int all = (a.cu_q[row + rows] - a.cu_q[row]) * a.group, step = all * together <= LINES ? together : 1;
        for (int head = 0; head < a.kv_heads; head += step)
            for (int first = 0; first < all; first += LINES) {
                int heads = std::min(step, a.kv_heads - head), each = std::min(LINES, all - first);
                Lines lines{row, rows, head, heads, first, each, 0, 0, found.shared};
                lines.key_begin = a.first_key(lines.position(a, 0));
                for (int i = 0; i < lines.each; ++i)
                    lines.key_end = std::max(lines.key_end, lines.position(a, i) + 1);
                result.push_back(lines);
            }
    }
    return result;
}

// What some lines take, in units of one line meeting one key.
int64_t cost(const Attention& a, const Lines& lines) {
    constexpr int FETCH = 4;  // units that a key costs before any line meets it
    if (lines.rows == 1) return int64_t(lines.key_end - lines.key_begin) * lines.kv_heads * (lines.each + FETCH);
    int64_t total = int64_t(lines.shared) * (lines.each + FETCH);
    for (int row = lines.row; row < lines.row + lines.rows; ++row)
        total += int64_t(a.kv_len[row] - lines.shared) * (a.group + FETCH);
    return total * lines.kv_heads;
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
    for (const Work& w : plan.divided) floats += (w.split_end - w.split_begin) * Partial::size(a, w.lines->count());
    plan.partials = make_floats(floats);
    float* next = plan.partials.get();
    for (Work& w : plan.divided) {
        w.partial = next;
        for (int i = w.split_begin; i < w.split_end; ++i, next += Partial::size(a, w.lines->count()))
            plan.work.push_back({w.lines, i, i + 1, next, w.cost / (w.split_end - w.split_begin)});
    }
    std::stable_sort(plan.work.begin(), plan.work.end(), [](const Work& x, const Work& y) { return x.cost > y.cost; });
    return plan;
}

}  // namespace
