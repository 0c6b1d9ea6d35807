// Cuts a batch into items of attention. The cut changes no bit of the result, see attention.h.

#pragma once

#include "native.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tokenmill {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Many rows of one sequence (a chunk) share the loads of K and V, so their items have one sequence. Few rows (a decode
/// has one) wait for memory, so a prefix that several sequences share is read once for all of them: the sequences form a
/// tree of prefixes, and an item of a node resumes the states of its parent.
class Planner {
  public:
    bool made_for(const Cache& cache, const Batch& batch, const Attend& job, int threads) const {
        return key_ == Key{batch.id, job.window, job.heads, cache.kv_heads, cache.dim, threads};
    }

    void make(const Cache& cache, const Batch& batch, const Attend& job, int threads) {
        key_ = {batch.id, job.window, job.heads, cache.kv_heads, cache.dim, threads};
        cache_ = &cache, batch_ = &batch, window_ = job.window, group_ = job.heads / cache.kv_heads;
        threads_ = threads;
        read_batch();
        share();
        apart_tiles_ = 0;
        fill();
        if (threads > 1 && !runs_.empty() && time() > 1.1 * work() / threads) {  // too few items for all threads
            apart_tiles_ = std::max(1, int(tiles() / (8 * threads)));
            fill();
        }
        states_.resize(size_t(num_states_) * job.heads * (STATE_HEADER + cache.dim));
        plan_ = {items_.data(), levels_.data(), int(levels_.size()), positions_.data(), state_at_.data(), states_.data()};
    }

    const Plan& plan() const { return plan_; }
    /// Rows whose tiles are merged at the end.
    const std::vector<int>& apart() const { return apart_; }

  private:
    struct Key {
        int64_t batch = -1;
        int window, heads, kv_heads, dim, threads;
        bool operator==(const Key& o) const {
            return batch == o.batch && window == o.window && heads == o.heads && kv_heads == o.kv_heads &&
                   dim == o.dim && threads == o.threads;
        }
    };
    /// All rows of a sequence that has few rows.
    struct Run {
        int token, count, high, blocks;  // first row; number of positions that the last row attends to
        const int32_t* table;
        int seen_by_all() const { return high - count + 1; }
    };
    struct Leveled {
        Item item;
        int level;
        int64_t cost;
    };
    static constexpr int FEW_ROWS = 24;
    static constexpr int STRIP = 12;  // rows that a kernel computes together

    void read_batch() {
        const Batch& batch = *batch_;
        positions_.clear(), runs_.clear();
        tokens_.resize(2 * size_t(batch.rows));
        std::iota(tokens_.begin(), tokens_.begin() + batch.rows, 0);
        chunk_rows_ = 0;
        for (int s = 0; s < batch.sequences; s++) {
            const int count = batch.cu[s + 1] - batch.cu[s], high = batch.contexts[s];
            for (int i = 0; i < count; i++) positions_.push_back(high - count + i);
            if (is_run(count))
                runs_.push_back({batch.cu[s], count, high, ceil_div(high, cache_->block_size), batch.tables + batch.table_at[s]});
            else
                chunk_rows_ += count;
        }
    }

    bool is_run(int count) const { return count == 1 || (count > 0 && count * group_ < FEW_ROWS); }
    int lowest_seen(int high) const { return window_ > 0 && high > window_ ? high - window_ : 0; }

    /// Sorts the runs by block table; finds how many whole tiles each shares with the next run.
    void share() {
        common_.assign(runs_.size() + 1, 0);
        if (runs_.size() > 1)
            std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) {
                const int blocks = std::min(a.blocks, b.blocks);
                const auto [x, y] = std::mismatch(a.table, a.table + blocks, b.table);
                if (x != a.table + blocks) return *x < *y;
                return a.blocks != b.blocks ? a.blocks < b.blocks : a.token < b.token;
            });
        for (size_t i = 0; i + 1 < runs_.size(); i++) {
            const Run &a = runs_[i], &b = runs_[i + 1];
            const int blocks = std::min(a.blocks, b.blocks);
            const int64_t equal = std::mismatch(a.table, a.table + blocks, b.table).first - a.table;
            common_[i + 1] = int(std::min<int64_t>({equal * cache_->block_size, a.seen_by_all(), b.seen_by_all()}) / TILE);
        }
        starts_.clear();
        int32_t* order = tokens_.data() + batch_->rows;
        for (const Run& run : runs_) {
            starts_.push_back(order);
            order = std::copy_n(tokens_.data() + run.token, run.count, order);
        }
        starts_.push_back(order);
    }

    /// Returns all items by level, the longest first, so that threads end at about the same time.
    void fill() {
        found_.clear(), apart_.clear(), items_.clear(), levels_.clear();
        state_at_.assign(batch_->rows, -1);
        num_states_ = 0;
        for (int s = 0; s < batch_->sequences; s++)
            if (!is_run(batch_->cu[s + 1] - batch_->cu[s])) chunk(s);
        nodes(0, int(runs_.size()), 0, 0);
        std::stable_sort(found_.begin(), found_.end(), [](const Leveled& a, const Leveled& b) {
            return a.level != b.level ? a.level < b.level : a.cost > b.cost;
        });
        for (const Leveled& x : found_) {
            while (int(levels_.size()) <= x.level) levels_.push_back(int(items_.size()));
            items_.push_back(x.item);
            levels_[x.level] = int(items_.size());
        }
    }

    void add(const Item& item, int level) {
        const int strips = item.heads * ceil_div(item.num_tokens * group_, STRIP);
        found_.push_back({item, level, int64_t(strips) * (ceil_div(item.end, TILE) - item.begin / TILE)});
    }

    /// Returns the number of tokens of each item into which `count` tokens are cut.
    int tokens_of_item(int count) const {
        const int most = std::max(1, ITEM_ROWS / group_), strip = std::max(1, STRIP / group_);
        const int wanted = ceil_div(count * cache_->kv_heads, 4 * threads_);
        return std::min(most, ceil_div(wanted, strip) * strip);
    }

    void chunk(int s) {
        const int begin = batch_->cu[s], count = batch_->cu[s + 1] - begin, size = tokens_of_item(chunk_rows_);
        for (int at = 0; at < count; at += size) {
            const int num = std::min(size, count - at), low = lowest_seen(positions_[begin + at] + 1);
            for (int head = 0; head < cache_->kv_heads; head++)
                add({tokens_.data() + begin + at, num, batch_->tables + batch_->table_at[s], head, 1, low,
                     positions_[begin + at + num - 1] + 1, false, false, false}, 0);
        }
    }

    /// Plans the runs [begin, end), which share `tile` tiles that are planned already, with states if `level` > 0.
    void nodes(int begin, int end, int tile, int level) {
        if (begin == end) return;
        if (end - begin == 1) return leaf(begin, tile, level);
        const int common = *std::min_element(common_.begin() + begin + 1, common_.begin() + end);
        int low = runs_[begin].high;
        for (int i = begin; i < end; i++) low = std::min(low, lowest_seen(runs_[i].seen_by_all()));
        low = std::max(low, tile * TILE);
        const bool any = common * TILE > low;
        if (any) {
            for (int i = begin; i < end; i++) keep_states(runs_[i]);
            const int count = int(starts_[end] - starts_[begin]), size = tokens_of_item(count);
            for (int at = 0; at < count; at += size)
                for (int head = 0; head < cache_->kv_heads; head++)
                    put({starts_[begin] + at, std::min(size, count - at), runs_[begin].table, head, 1, low,
                         common * TILE, level > 0, true, false}, level);
        }
        for (int from = begin, i = begin + 1; i <= end; i++)
            if (i == end || common_[i] == common) {
                nodes(from, i, std::max(tile, common), level + any);
                from = i;
            }
    }

    void leaf(int i, int tile, int level) {
        const Run& run = runs_[i];
        const int heads = std::max(1, ITEM_ROWS / (group_ * run.count));
        const int begin = std::max(tile * TILE, lowest_seen(run.seen_by_all()));
        if (apart_tiles_) keep_states(run);
        for (int head = 0; head < cache_->kv_heads; head += heads)
            put({starts_[i], run.count, run.table, head, std::min(heads, cache_->kv_heads - head), begin, run.high,
                 level > 0, false, false}, level);
    }

    /// Adds an item of runs; if there are few items, in pieces that do not depend on each other.
    void put(Item item, int level) {
        if (!apart_tiles_) return add(item, level);
        item.apart = true, item.resumes = false, item.leaves = true;
        const int end = item.end, size = apart_tiles_ * TILE;
        for (; item.begin < end; item.begin = item.end) {
            item.end = std::min(end, item.begin / TILE * TILE + size);
            add(item, 0);
        }
    }

    void keep_states(const Run& run) {
        for (int i = 0; i < run.count; i++) {
            const int token = run.token + i, high = positions_[token] + 1;
            if (state_at_[token] >= 0) continue;
            state_at_[token] = num_states_;
            num_states_ += apart_tiles_ ? ceil_div(high, TILE) - lowest_seen(high) / TILE : 1;
            if (apart_tiles_) apart_.push_back(token);
        }
    }

    int64_t work() const {
        return std::accumulate(found_.begin(), found_.end(), int64_t(0), [](int64_t sum, const Leveled& x) { return sum + x.cost; });
    }

    /// Estimates the time of all items if each thread takes the next item when it is free.
    int64_t time() const {
        int64_t sum = 0, begin = 0;
        for (const int end : levels_) {
            std::vector<int64_t> busy(threads_);
            for (int64_t i = begin; i < end; i++) *std::min_element(busy.begin(), busy.end()) += found_[i].cost;
            sum += *std::max_element(busy.begin(), busy.end());
            begin = end;
        }
        return sum;
    }

    int64_t tiles() const {
        int64_t sum = 0;
        for (const Run& run : runs_) sum += ceil_div(run.high, TILE) - lowest_seen(run.seen_by_all()) / TILE;
        return sum;
    }

    Key key_;
    Plan plan_;
    const Cache* cache_ = nullptr;
    const Batch* batch_ = nullptr;
    int window_ = 0, group_ = 1, threads_ = 1, apart_tiles_ = 0, chunk_rows_ = 0;
    int64_t num_states_ = 0;
    std::vector<Leveled> found_;
    std::vector<Item> items_;
    std::vector<int> levels_, common_, apart_;
    std::vector<Run> runs_;
    std::vector<int32_t*> starts_;
    std::vector<int32_t> tokens_, positions_;
    std::vector<int64_t> state_at_;
    std::vector<float> states_;
};

}  // namespace tokenmill
