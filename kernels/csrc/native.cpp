// Entry points: choose the instruction set, plan a batch's work, hand it to torch's own OpenMP threads.

#include "native.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace tokenmill {
namespace {

const Kernels* chosen = nullptr;

// ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
/// `GOMP_parallel` of the OpenMP runtime that torch has loaded. This library links none: two would fight for the cores.
Parallel gomp_parallel = nullptr;

template <class Fn>
struct Job {
    const Fn& fn;
    const int count, grain;
    std::atomic<int> next{0};

    static void work(void* self) {
        Job& job = *static_cast<Job*>(self);
        for (int at; (at = job.next.fetch_add(job.grain, std::memory_order_relaxed)) < job.count;)
            for (int i = at, end = std::min(at + job.grain, job.count); i < end; i++) job.fn(i);
    }
};

/// fn(0) … fn(count - 1), `grain` at a time by whichever thread is free.
template <class Fn>
void each(int count, int grain, int threads, const Fn& fn) {
    Job<Fn> job{fn, count, grain};
    if (threads > 1 && count > grain && gomp_parallel)
        gomp_parallel(Job<Fn>::work, &job, unsigned(threads), 0);
    else
        Job<Fn>::work(&job);
}

// ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────

int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// A batch cut into items. Which items there are changes no bit of the result; see attention.h.
class Planner {
  public:
    const Plan& plan(const Cache& cache, const Batch& batch, const Attend& job, int threads) {
        const Key key{batch.id, job.window, job.heads, cache.kv_heads, cache.dim, threads};
        if (!(key == key_)) {
            make(cache, batch, job, threads);
            key_ = key;
        }
        return plan_;
    }
    /// Rows whose tiles must be merged at the end.
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
    /// A sequence that computes one token.
    struct Single {
        int token, high, blocks;
        const int32_t* table;
    };

    void make(const Cache& cache, const Batch& batch, const Attend& job, int threads) {
        cache_ = &cache, window_ = job.window;
        tokens_per_item_ = std::max(1, ITEM_ROWS / (job.heads / cache.kv_heads));
        items_.clear(), singles_.clear(), apart_.clear(), positions_.clear();
        tokens_.resize(2 * batch.rows);
        std::iota(tokens_.begin(), tokens_.begin() + batch.rows, 0);
        part_at_.assign(batch.rows, -1);
        parts_used_ = 0;
        for (int s = 0; s < batch.sequences; s++) {
            const int count = batch.cu[s + 1] - batch.cu[s], high = batch.contexts[s];
            for (int i = 0; i < count; i++) positions_.push_back(high - count + i);
            if (count == 1)
                singles_.push_back({batch.cu[s], high, ceil_div(high, cache.block_size), batch.tables + batch.table_at[s]});
        }
        shared();
        for (int s = 0; s < batch.sequences; s++)
            if (batch.cu[s + 1] - batch.cu[s] > 1) chunk(batch, s, threads);
        split_tiles_ = 0;
        if (threads > 1) {
            int64_t tiles = 0;
            for (const Single& x : singles_) tiles += ceil_div(x.high, TILE) - first_tile(x.high);
            const int64_t units = int64_t(items_.size()) + int64_t(singles_.size()) * cache.kv_heads;
            if (units < 4 * threads) split_tiles_ = int(std::max<int64_t>(1, tiles * cache.kv_heads / (8 * threads)));
        }
        int32_t* order = tokens_.data() + batch.rows;
        for (const Single& x : singles_) *order++ = x.token;
        groups(0, int(singles_.size()), 0, tokens_.data() + batch.rows);
        // Shared prefixes first: they are the longest.
        const auto single =
            std::stable_partition(items_.begin(), items_.end(), [](const Item& x) { return x.num_tokens > 1; });
        parts_.resize(size_t(parts_used_) * job.heads * (PART_HEADER + cache.dim));
        // A sequence's KV heads lie side by side in memory: one thread takes them all, if there is enough to do.
        plan_ = {items_.data(),     int(items_.size()), int(single - items_.begin()), split_tiles_ ? 1 : cache.kv_heads,
                 positions_.data(), part_at_.data(),    parts_.data()};
    }

    int first_tile(int high) const { return window_ > 0 && high > window_ ? (high - window_) / TILE : 0; }

    void chunk(const Batch& batch, int s, int threads) {
        const int begin = batch.cu[s], count = batch.cu[s + 1] - begin;
        const int wanted = ceil_div(count * cache_->kv_heads, 4 * threads);
        const int size = std::min(tokens_per_item_, std::max(wanted, 4));
        for (int end = count; end > 0; end -= size) {  // the longest first
            const int at = std::max(0, end - size), position = positions_[begin + at];
            for (int head = 0; head < cache_->kv_heads; head++)
                items_.push_back({tokens_.data() + begin + at, end - at, batch.tables + batch.table_at[s], head,
                                  first_tile(position + 1), ceil_div(positions_[begin + end - 1] + 1, TILE), false});
        }
    }

    /// Sorts the singles by block table, and finds how many whole tiles each has in common with the next one.
    void shared() {
        common_.assign(singles_.size() + 1, 0);
        if (window_ > 0 || singles_.size() < 2) return;
        std::sort(singles_.begin(), singles_.end(), [](const Single& a, const Single& b) {
            const int blocks = std::min(a.blocks, b.blocks);
            const auto [x, y] = std::mismatch(a.table, a.table + blocks, b.table);
            if (x != a.table + blocks) return *x < *y;
            return a.blocks != b.blocks ? a.blocks < b.blocks : a.token < b.token;
        });
        for (size_t i = 0; i + 1 < singles_.size(); i++) {
            const Single &a = singles_[i], &b = singles_[i + 1];
            const int blocks = std::min(a.blocks, b.blocks);
            const int64_t equal = std::mismatch(a.table, a.table + blocks, b.table).first - a.table;
            common_[i + 1] = int(std::min<int64_t>({equal * cache_->block_size, a.high, b.high}) / TILE);
        }
    }

    /// Singles [begin, end) have `tile` tiles in common, which are planned. Plans the rest.
    void groups(int begin, int end, int tile, const int32_t* order) {
        if (end - begin == 1) return alone(begin, tile, order);
        if (begin == end) return;
        const int common = *std::min_element(common_.begin() + begin + 1, common_.begin() + end);
        if (common > tile) {
            for (int i = begin; i < end; i++) set_apart(singles_[i]);
            for (int at = begin; at < end; at += tokens_per_item_)
                for (int head = 0; head < cache_->kv_heads; head++)
                    items_.push_back({order + at, std::min(tokens_per_item_, end - at), singles_[at].table, head, tile,
                                      common, true});
        }
        for (int from = begin, i = begin + 1; i <= end; i++)
            if (i == end || common_[i] == common) {
                groups(from, i, std::max(tile, common), order);
                from = i;
            }
    }

    void alone(int i, int tile, const int32_t* order) {
        const Single& x = singles_[i];
        const int begin = std::max(tile, first_tile(x.high)), end = ceil_div(x.high, TILE);
        const bool cut = split_tiles_ > 0 && end - begin > split_tiles_;
        if (cut) set_apart(x);
        const int size = cut ? split_tiles_ : std::max(1, end - begin);
        for (int head = 0; head < cache_->kv_heads; head++)
            for (int at = begin; at < end; at += size)
                items_.push_back({order + i, 1, x.table, head, at, std::min(end, at + size), part_at_[x.token] >= 0});
    }

    void set_apart(const Single& x) {
        if (part_at_[x.token] >= 0) return;
        part_at_[x.token] = parts_used_;
        parts_used_ += ceil_div(x.high, TILE) - first_tile(x.high);
        apart_.push_back(x.token);
    }

    Key key_;
    Plan plan_;
    const Cache* cache_ = nullptr;
    int window_ = 0, tokens_per_item_ = 1, split_tiles_ = 0;
    int64_t parts_used_ = 0;
    std::vector<Item> items_;
    std::vector<Single> singles_;
    std::vector<int> common_, apart_;
    std::vector<int32_t> tokens_, positions_;
    std::vector<int64_t> part_at_;
    std::vector<float> parts_;
};

}  // namespace
}  // namespace tokenmill

using namespace tokenmill;

/// Of the functions and structures here; kernels/native.py names the one it was written for.
API int tm_version() { return 4; }

/// Picks the kernels: 3 AVX-512 with bf16 products, 2 AVX-512, 1 AVX2; at most `limit`. Returns the one picked; 0: none.
API int tm_choose(int limit) {
    chosen = nullptr;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (bf16 && limit >= 3) return chosen = &avx512_bf16_kernels, 3;
    if (avx512 && limit >= 2) return chosen = &avx512_kernels, 2;
    if (avx2 && limit >= 1) return chosen = &avx2_kernels, 1;
#endif
    (void)limit;
    return 0;
}

API void tm_set_parallel(void* function) { gomp_parallel = reinterpret_cast<Parallel>(function); }

/// Asks for huge pages where a pool will be; it should not have been touched yet.
API int tm_huge_pages(void* begin, int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(begin) + page - 1) & -page;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(begin) + uintptr_t(bytes)) & -page;
    if (to > from) return madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
    (void)begin, (void)bytes;
    return 0;
}

API void tm_attend(const Cache* cache, const Batch* batch, const Attend* job, int threads) {
    static thread_local Planner planner;
    const Plan& plan = planner.plan(*cache, *batch, *job, threads);
    const int units = plan.first_single + ceil_div(plan.num_items - plan.first_single, plan.run);
    each(units, 1, threads, [&](int unit) {
        const int past = unit - plan.first_single;
        const int begin = past < 0 ? unit : plan.first_single + past * plan.run;
        const int end = past < 0 ? unit + 1 : std::min(begin + plan.run, plan.num_items);
        for (int i = begin; i < end; i++)
            chosen->attend(*cache, *job, plan, plan.items[i], i + 1 < plan.num_items ? &plan.items[i + 1] : nullptr);
    });
    const std::vector<int>& apart = planner.apart();
    each(int(apart.size()), 4, threads, [&](int i) { chosen->reduce(*cache, *batch, *job, plan, apart[i]); });
    const int64_t row_bytes = int64_t(job->heads) * cache->dim * (cache->is_bf16 ? 2 : 4);
    std::memset(static_cast<uint8_t*>(job->out) + batch->rows * row_bytes, 0,
                (batch->padded_rows - batch->rows) * row_bytes);
}

API void tm_store(const Cache* cache, const Batch* batch, int layer, const void* k, int64_t k_stride, const void* v,
                  int64_t v_stride, int threads) {
    each(batch->rows, 16, threads,
         [&](int row) { chosen->store(*cache, *batch, layer, k, k_stride, v, v_stride, row); });
}

API void tm_write(const Cache* cache, const Batch* batch, const Write* job, int threads) {
    each(batch->rows, 16, threads, [&](int row) { chosen->write(*cache, *batch, *job, row); });
}

API void tm_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int rows, int cols, float eps,
                         int is_bf16, int wide_weight, int threads) {
    const int64_t bytes = int64_t(cols) * (is_bf16 ? 2 : 4);
    const auto at = [&](const void* p, int row) { return static_cast<const uint8_t*>(p) + row * bytes; };
    each(rows, 16, threads, [&](int row) {
        chosen->add_rms_norm(x ? at(x, row) : nullptr, static_cast<uint8_t*>(residual) + row * bytes, weight,
                             static_cast<uint8_t*>(out) + row * bytes, cols, eps, is_bf16, wide_weight);
    });
}

API void tm_silu_mul(const void* gate_up, void* out, int rows, int cols, int is_bf16, int threads) {
    const int64_t bytes = int64_t(cols) * (is_bf16 ? 2 : 4);
    each(rows, 16, threads, [&](int row) {
        chosen->silu_mul(static_cast<const uint8_t*>(gate_up) + 2 * row * bytes, static_cast<uint8_t*>(out) + row * bytes,
                         cols, is_bf16);
    });
}

API void tm_gelu_mul(const void* gate_up, void* out, int rows, int cols, int is_bf16, int threads) {
    const int64_t bytes = int64_t(cols) * (is_bf16 ? 2 : 4);
    each(rows, 16, threads, [&](int row) {
        chosen->gelu_mul(static_cast<const uint8_t*>(gate_up) + 2 * row * bytes, static_cast<uint8_t*>(out) + row * bytes,
                         cols, is_bf16);
    });
}

API void tm_softcap(void* x, int rows, int cols, float cap, int is_bf16, int threads) {
    const int64_t bytes = int64_t(cols) * (is_bf16 ? 2 : 4);
    each(rows, 1, threads,
         [&](int row) { chosen->softcap(static_cast<uint8_t*>(x) + row * bytes, cols, cap, is_bf16); });
}

API void tm_quantize(const void* x, uint8_t* out, float* steps, int rows, int cols, int is_bf16, int threads) {
    const int64_t bytes = int64_t(cols) * (is_bf16 ? 2 : 4);
    each(rows, 16, threads, [&](int row) {
        chosen->quantize(static_cast<const uint8_t*>(x) + row * bytes, out + int64_t(row) * cols, steps + row, cols, is_bf16);
    });
}

API void tm_argmax(const void* x, int64_t stride, int rows, int cols, int is_bf16, int64_t* places, bool* finite,
                   int threads) {
    const int64_t bytes = stride * (is_bf16 ? 2 : 4);
    each(rows, 1, threads, [&](int row) {
        chosen->argmax(static_cast<const uint8_t*>(x) + row * bytes, cols, is_bf16, places + row, finite + row);
    });
}

/// Whether `tm_matmul` runs here.
API int tm_has_matmul() { return chosen && chosen->matmul; }

API void tm_matmul(const Product* p, int threads) {
    constexpr int BLOCK_ROWS = 96;  // with 2,000 inputs they fill a part of the second-level cache beside a panel
    const int columns = p->gated ? 2 * ceil_div(p->cols, PANEL) * PANEL : p->cols;
    const int panels = ceil_div(columns, PANEL), blocks = ceil_div(p->rows, BLOCK_ROWS);
    const bool wide = p->gated || (panels % 2 == 0 && p->rows > 6 && panels * blocks >= 32 * threads);
    const int width = wide ? 2 * PANEL : PANEL, pieces = ceil_div(columns, width);
    each(pieces * blocks, 1, threads, [&](int unit) {
        const int row = unit / pieces * BLOCK_ROWS, piece = unit % pieces;
        const int64_t ahead = piece + threads < pieces ? int64_t(threads) * width / PANEL * p->steps * PANEL_STEP : 0;
        chosen->matmul(*p, row, std::min(BLOCK_ROWS, p->rows - row), piece * width, width, ahead);
    });
}
