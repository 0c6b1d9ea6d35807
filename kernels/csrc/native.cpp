// Entry points: choose the instruction set, plan the work of a batch, run it on the OpenMP threads of torch.

#include "native.h"
#include "planner.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
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
/// `GOMP_parallel` of the OpenMP runtime that torch has loaded. This library links no runtime of its own: two runtimes
/// would compete for the cores.
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

/// Calls fn(0) … fn(count - 1); each free thread takes the next `grain` calls.
template <class Fn>
void each(int count, int grain, int threads, const Fn& fn) {
    Job<Fn> job{fn, count, grain};
    if (threads > 1 && count > grain && gomp_parallel)
        gomp_parallel(Job<Fn>::work, &job, unsigned(threads), 0);
    else
        Job<Fn>::work(&job);
}

/// Calls fn for all items of attention; each thread knows its next item before it begins an item.
void attend_items(const Cache& cache, const Attend& job, const Plan& plan, int begin, int end, int threads) {
    std::atomic<int> next{begin};
    each(std::min(threads, end - begin), 1, threads, [&](int) {
        Ahead ahead{};
        int at = next.fetch_add(1, std::memory_order_relaxed);
        while (at < end) {
            const int following = next.fetch_add(1, std::memory_order_relaxed);
            chosen->attend(cache, job, plan, plan.items[at], following < end ? &plan.items[following] : nullptr, ahead);
            at = following;
        }
    });
}

/// The plans of a batch, one for each window.
class Plans {
  public:
    const Planner& of(const Cache& cache, const Batch& batch, const Attend& job, int threads) {
        for (const Planner& planner : planners_)
            if (planner.made_for(cache, batch, job, threads)) return planner;
        next_ = (next_ + 1) % planners_.size();
        planners_[next_].make(cache, batch, job, threads);
        return planners_[next_];
    }

  private:
    std::array<Planner, 4> planners_;
    size_t next_ = 0;
};

}  // namespace
}  // namespace tokenmill

using namespace tokenmill;

/// Version of functions and structures; kernels/native.py has the same number.
API int tm_version() { return 4; }

/// Chooses the kernels: 3 AVX-512 with bf16 products, 2 AVX-512, 1 AVX2; at most `limit`. Returns the choice; 0: none.
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

/// Asks for huge pages for memory that was not written yet.
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
    static thread_local Plans plans;
    const Planner& planner = plans.of(*cache, *batch, *job, threads);
    const Plan& plan = planner.plan();
    for (int level = 0, begin = 0; level < plan.num_levels; begin = plan.levels[level++])
        attend_items(*cache, *job, plan, begin, plan.levels[level], threads);
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

/// Whether `tm_matmul` runs on this CPU.
API int tm_has_matmul() { return chosen && chosen->matmul; }

API void tm_matmul(const Product* p, int threads) {
    constexpr int BLOCK_ROWS = 96;  // with 2,000 inputs they fit into the second-level cache beside a panel
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
