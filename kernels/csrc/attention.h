// Paged attention over the cache in place. Included once for each instruction set, inside its namespace.
//
// A row's keys are cut into tiles of 128 positions from position 0. Each tile gives (maximum, total, sums of V) of its
// own, and tiles are merged in order. Every sum of a tile runs in the order of the keys or of the dimensions, in a lane
// of its own, so that neither the rows computed beside it, nor the item that a tile belongs to, nor the thread changes
// a bit; a masked position adds an exact zero.

/// bf16 pairs through the CPU's own dot product.
#if TM_BF16
struct Dot {
    typedef bf16 T;                          // as stored
    typedef uint32_t C;                      // a coefficient: of a query's dimensions, or a row's weights
    static constexpr int PAIR = 2;           // elements in a stored lane
    static constexpr int WIDTH = 2;          // elements in a coefficient
    static constexpr int EXP_TERMS = 5;      // enough: weights are rounded to bf16
    INLINE F mac(F acc, U x, const C* c, int i) { return dot2(acc, x, c[i]); }
    INLINE void put(C* c, int i, F x) { store(reinterpret_cast<bf16*>(c) + i, x); }
};
#endif
/// bf16 as stored, fp32 arithmetic.
struct Widen {
    typedef bf16 T;
    typedef float C;
    static constexpr int PAIR = 2, WIDTH = 1, EXP_TERMS = 7;
    INLINE F mac(F acc, U x, const C* c, int i) {
        return fma(odd(x), set1(c[2 * i + 1]), fma(even(x), set1(c[2 * i]), acc));
    }
    INLINE void put(C* c, int i, F x) { store(c + i, x); }
};
struct Single {
    typedef float T;
    typedef float C;
    static constexpr int PAIR = 1, WIDTH = 1, EXP_TERMS = 7;
    INLINE F mac(F acc, U x, const C* c, int i) { return fma(as_float(x), set1(c[i]), acc); }
    INLINE void put(C* c, int i, F x) { store(c + i, x); }
};

// As many sums at once as registers hold: enough of them to hide the latency of an addition.
#if TM_AVX512
constexpr int MAX_ROWS = 12;
constexpr int pages_at_once(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }
constexpr int vectors_at_once(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int MAX_ROWS = 4;
constexpr int pages_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

constexpr int PAGES = TILE / PAGE;
constexpr int Q_PITCH = MAX_DIM + 16;  // coefficients: known to the compiler, and not a power of 2, which caches mind
constexpr float LOWEST = -1e30f;  // less than any score, and finite: LOWEST - LOWEST is 0

/// A thread's memory.
struct Scratch {
    alignas(64) float q[(ITEM_ROWS + MAX_ROWS) * Q_PITCH];
    alignas(64) float sums[ITEM_ROWS * MAX_DIM];
    alignas(64) float scores[MAX_ROWS * TILE];
    alignas(64) float weights[MAX_ROWS * TILE];
    float top[ITEM_ROWS + 16], total[ITEM_ROWS + 16];
    int low[ITEM_ROWS], high[ITEM_ROWS];  // positions that a row sees
};

/// Some rows of an item over one tile.
struct Strip {
    int first, rows;                       // within the item
    int begin;                             // the tile's first position
    int page_begin, page_end;              // of the tile, that any row sees
    int keys;                              // of the tile, from its begin, up to the last that any row sees
    const uint8_t* page[PAGES];
    const uint8_t* next[PAGES];            // pages to fetch meanwhile
    float* part[MAX_ROWS];                 // where the tile's sums go; null: they are merged
    float old_scale[16], new_scale[16];
};

INLINE void fetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

/// Products of R queries with the keys of a tile.
template <class M, int R>
INLINE void scores_of(const Strip& strip, const typename M::C* q, int dim, float* out) {
    constexpr int P = pages_at_once(R);
    const int steps = dim / M::PAIR;
    for (int at = strip.page_begin & -P; at < strip.page_end; at += P) {
        F acc[R][P];
        const uint8_t* const* k = strip.page + at;
        const uint8_t* const* next = strip.next + at;
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r][p] = zero();
        }
        for (int i = 0; i < steps; i++) {
            U x[P];
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                x[p] = load_u(k[p] + i * 64);
                fetch(next[p] + i * 64);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
                for (int p = 0; p < P; p++) acc[r][p] = M::mac(acc[r][p], x[p], q + r * Q_PITCH, i);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) store(out + r * TILE + (at + p) * PAGE, acc[r][p]);
        }
    }
}

/// The scores of one row become weights; their maximum is returned as a power of 2.
template <class M>
INLINE void weigh(const Strip& strip, const Attend& job, int low, int high, float* scores, typename M::C* weights,
                  float* top, float* total) {
    const F hidden = set1(-__builtin_inff());
    F highest = set1(LOWEST);
    for (int page = strip.page_begin; page < strip.page_end; page++) {
        const int at = page * PAGE;
        F x = load(scores + at);
        if (job.softcap > 0) x = mul(tanh(mul(x, set1(job.scale / job.softcap))), set1(job.softcap));
        if (low > at || high < at + PAGE) x = keep(x, low - at, high - at, hidden);
        if (job.softcap > 0 || low > at || high < at + PAGE) store(scores + at, x);
        highest = max(highest, x);
    }
    const float unit = job.softcap > 0 ? LOG2E : job.scale * LOG2E;
    const float peak = hmax(highest) * unit;
    F sum = zero();
    for (int page = strip.page_begin; page < strip.page_end; page++) {
        const F p = exp2<M::EXP_TERMS>(fma(load(scores + page * PAGE), set1(unit), set1(-peak)));
        sum = add(sum, p);
        M::put(weights, page * PAGE, p);
    }
    *top = peak;
    *total = hsum(sum);
}

/// Merges one tile's (maximum, total) into what came before, lane by lane; the scales are for the sums of both.
INLINE void merge(float* top, float* total, const float* new_top, const float* new_total, float* old_scale,
                  float* new_scale) {
    const F before = load(top), fresh = load(new_top), both = max(before, fresh);
    const F a = exp2<7>(sub(before, both)), b = exp2<7>(sub(fresh, both));
    store(top, both);
    store(total, fma(load(total), a, mul(load(new_total), b)));
    store(old_scale, a);
    store(new_scale, b);
}

/// Weighted sums of V over a tile, for D vectors of the dimensions from vector `at` on.
template <class M, int R, int D>
INLINE void sums_of(const Strip& strip, const typename M::C* weights, int dim, int at, float* sums) {
    constexpr int PITCH = TILE / M::WIDTH, STEPS = PAGE / M::PAIR;
    F acc[R][D];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) acc[r][d] = zero();
    }
    const int64_t value_at = int64_t(PAGE) * dim * sizeof(typename M::T) + at * 64;
    for (int page = strip.page_begin; page < strip.page_end; page++) {
        const uint8_t* v = strip.page[page] + value_at;
        const uint8_t* next = strip.next[page] + value_at;
        const int keys = strip.keys - page * PAGE;
        const int steps = keys >= PAGE ? STEPS : keys / M::PAIR;
        int i = page * STEPS;
        for (int step = 0; step < steps; step++, i++, v += dim * 4, next += dim * 4) {
            U x[D];
#pragma GCC unroll 8
            for (int d = 0; d < D; d++) {
                x[d] = load_u(v + d * 64);
                fetch(next + d * 64);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
                for (int d = 0; d < D; d++) acc[r][d] = M::mac(acc[r][d], x[d], weights + r * PITCH, i);
            }
        }
        if (M::PAIR == 2 && keys < PAGE && keys % 2) {  // the other one of the pair may never have been written
            U x[D];
#pragma GCC unroll 8
            for (int d = 0; d < D; d++) x[d] = lower_half(load_u(v + d * 64));
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
                for (int d = 0; d < D; d++) acc[r][d] = M::mac(acc[r][d], x[d], weights + r * PITCH, i);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if (r >= strip.rows) break;
        float* to = (strip.part[r] ? strip.part[r] + PART_HEADER : sums + r * dim) + at * 16;
        const F before = set1(strip.old_scale[r]), fresh = set1(strip.new_scale[r]);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) {
            F x = acc[r][d];
            if (!strip.part[r]) x = fma(load(to + d * 16), before, mul(x, fresh));
            store(to + d * 16, x);
        }
    }
}

/// R rows over one tile.
template <class M, int R>
static __attribute__((noinline)) void strip_of(Strip& strip, const Attend& job, int dim, Scratch& mine) {
    typedef typename M::C C;
    C* weights = reinterpret_cast<C*>(mine.weights);
    const C* q = reinterpret_cast<const C*>(mine.q) + strip.first * Q_PITCH;
    scores_of<M, R>(strip, q, dim, mine.scores);
    float top[16], total[16];
    store(top, set1(LOWEST));  // lanes past this strip belong to the next one: nothing is merged into them
    store(total, zero());
    for (int r = 0; r < strip.rows; r++) {
        const int low = mine.low[strip.first + r] - strip.begin, high = mine.high[strip.first + r] - strip.begin;
        weigh<M>(strip, job, low, high, mine.scores + r * TILE, weights + r * (TILE / M::WIDTH), &top[r], &total[r]);
        if (strip.part[r]) {
            strip.part[r][0] = top[r];
            strip.part[r][1] = total[r];
        }
    }
    if (!strip.part[0])
        merge(mine.top + strip.first, mine.total + strip.first, top, total, strip.old_scale, strip.new_scale);
    constexpr int D = vectors_at_once(R);
    float* sums = mine.sums + int64_t(strip.first) * dim;
    int at = 0;
    for (; at + D <= dim / 16; at += D) sums_of<M, R, D>(strip, weights, dim, at, sums);
    for (; at < dim / 16; at++) sums_of<M, R, 1>(strip, weights, dim, at, sums);
}

template <class M>
INLINE void any_strip(Strip& strip, const Attend& job, int dim, Scratch& mine) {
    const int rows = strip.rows;
    if (rows == 1) return strip_of<M, 1>(strip, job, dim, mine);
    if (rows == 2) return strip_of<M, 2>(strip, job, dim, mine);
    if (rows == 3) return strip_of<M, 3>(strip, job, dim, mine);
    if (rows == 4) return strip_of<M, 4>(strip, job, dim, mine);
#if TM_AVX512
    if (rows <= 6) return strip_of<M, 6>(strip, job, dim, mine);
    if (rows <= 8) return strip_of<M, 8>(strip, job, dim, mine);
    return strip_of<M, 12>(strip, job, dim, mine);
#endif
}

/// The pages of a tile that hold positions below `end`; the rest repeat one of them, so that reading them is safe.
INLINE void find_pages(const Cache& cache, const Attend& job, const Item& item, int tile, int end, const uint8_t** to) {
    const int64_t head = cache.head_at(job.layer, item.head), page_bytes = cache.page_bytes();
    const int per_block = cache.block_size / PAGE;
    for (int p = 0; p < PAGES; p++) {
        const int page = tile * PAGES + p;
        to[p] = page * PAGE < end || p == 0
                    ? cache.pool + item.table[page / per_block] * cache.block_bytes + head + page % per_block * page_bytes
                    : to[p - 1];
    }
}

/// Where a row's sums over a tile go, or null if the row sees nothing of it.
INLINE float* part_of(const Cache& cache, const Attend& job, const Plan& plan, int token, int head, int low, int high,
                      int tile) {
    if (tile < low / TILE || tile * TILE >= high) return nullptr;
    const int64_t at = plan.part_at[token] + tile - low / TILE;
    return plan.parts + (at * job.heads + head) * (PART_HEADER + cache.dim);
}

template <class M>
static void attend_item(const Cache& cache, const Attend& job, const Plan& plan, const Item& item,
                        const Item* following, Scratch& mine) {
    typedef typename M::T T;
    typedef typename M::C C;
    const int dim = cache.dim, group = job.heads / cache.kv_heads, rows = item.num_tokens * group;
    int last = 0;
    for (int row = 0; row < rows; row++) {
        const int token = item.tokens[row / group], head = item.head * group + row % group;
        const T* q = static_cast<const T*>(job.q) + token * job.q_stride + int64_t(head) * dim;
        C* to = reinterpret_cast<C*>(mine.q) + row * Q_PITCH;
        for (int d = 0; d < dim; d += 16) M::put(to, d, load(q + d));
        mine.high[row] = plan.positions[token] + 1;
        mine.low[row] = job.window > 0 && mine.high[row] > job.window ? mine.high[row] - job.window : 0;
        mine.top[row] = LOWEST;
        mine.total[row] = 0;
        last = mine.high[row] > last ? mine.high[row] : last;
    }
    if (!item.partial) __builtin_memset(mine.sums, 0, sizeof(float) * rows * dim);
    Strip strip;
    float nowhere[PART_HEADER + MAX_DIM];
    for (int tile = item.tile_begin; tile < item.tile_end; tile++) {
        strip.begin = tile * TILE;
        if (tile == item.tile_begin)
            find_pages(cache, job, item, tile, last, strip.page);
        else
            __builtin_memcpy(strip.page, strip.next, sizeof strip.page);
        if (tile + 1 < item.tile_end)
            find_pages(cache, job, item, tile + 1, last, strip.next);
        else if (following)
            find_pages(cache, job, *following, following->tile_begin, plan.positions[following->tokens[0]] + 1, strip.next);
        else
            __builtin_memcpy(strip.next, strip.page, sizeof strip.page);
        for (strip.first = 0; strip.first < rows; strip.first += strip.rows) {
            strip.rows = rows - strip.first < MAX_ROWS ? rows - strip.first : MAX_ROWS;
            int low = mine.low[strip.first], high = 0;
            for (int r = 0; r < strip.rows; r++) {
                const int row = strip.first + r;
                low = mine.low[row] < low ? mine.low[row] : low;
                high = mine.high[row] > high ? mine.high[row] : high;
                strip.part[r] = nullptr;
                if (!item.partial) continue;
                strip.part[r] = part_of(cache, job, plan, item.tokens[row / group], item.head * group + row % group,
                                        mine.low[row], mine.high[row], tile);
                if (!strip.part[r]) strip.part[r] = nowhere;
            }
            if (high <= strip.begin || low >= strip.begin + TILE) continue;
            strip.keys = high - strip.begin < TILE ? high - strip.begin : TILE;
            strip.page_begin = low > strip.begin ? (low - strip.begin) / PAGE : 0;
            strip.page_end = (strip.keys + PAGE - 1) / PAGE;
            any_strip<M>(strip, job, dim, mine);
        }
    }
    if (item.partial) return;
    for (int row = 0; row < rows; row++) {
        const int token = item.tokens[row / group], head = item.head * group + row % group;
        T* to = static_cast<T*>(job.out) + (int64_t(token) * job.heads + head) * dim;
        const F total = set1(mine.total[row]);
        for (int d = 0; d < dim; d += 16) store(to + d, div(load(mine.sums + int64_t(row) * dim + d), total));
    }
}

static void attend(const Cache& cache, const Attend& job, const Plan& plan, const Item& item, const Item* following) {
    static thread_local Scratch here;
    Scratch* mine = &here;
    asm volatile("" : "+r"(mine));  // else the compiler looks the address up again in the innermost loops
    if (!cache.is_bf16) return attend_item<Single>(cache, job, plan, item, following, *mine);
#if TM_BF16
    attend_item<Dot>(cache, job, plan, item, following, *mine);
#else
    attend_item<Widen>(cache, job, plan, item, following, *mine);
#endif
}

/// Merges the tiles of a row that were computed apart, in order.
template <class T>
static void reduce_row(const Cache& cache, const Attend& job, const Plan& plan, int token) {
    const int dim = cache.dim, high = plan.positions[token] + 1;
    const int low = job.window > 0 && high > job.window ? high - job.window : 0;
    for (int head = 0; head < job.heads; head++) {
        float top[16], total[16], old_scale[16], new_scale[16], new_top[16], new_total[16];
        alignas(64) float sums[MAX_DIM] = {};
        store(top, set1(LOWEST));
        store(total, zero());
        for (int tile = low / TILE; tile * TILE < high; tile++) {
            const float* part = part_of(cache, job, plan, token, head, low, high, tile);
            store(new_top, set1(part[0]));
            store(new_total, set1(part[1]));
            merge(top, total, new_top, new_total, old_scale, new_scale);
            const F before = set1(old_scale[0]), fresh = set1(new_scale[0]);
            for (int d = 0; d < dim; d += 16)
                store(sums + d, fma(load(sums + d), before, mul(load(part + PART_HEADER + d), fresh)));
        }
        T* to = static_cast<T*>(job.out) + (int64_t(token) * job.heads + head) * dim;
        for (int d = 0; d < dim; d += 16) store(to + d, div(load(sums + d), set1(total[0])));
    }
}

static void reduce(const Cache& cache, const Batch&, const Attend& job, const Plan& plan, int token) {
    if (cache.is_bf16)
        reduce_row<bf16>(cache, job, plan, token);
    else
        reduce_row<float>(cache, job, plan, token);
}

/// One token's K and V of one head, into its slot.
template <class T>
INLINE void store_head(const Cache& cache, int layer, int head, int64_t slot, const T* k, const T* v) {
    constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
    const int dim = cache.dim, at = int(slot % cache.block_size);
    uint8_t* page = cache.pool + slot / cache.block_size * cache.block_bytes + cache.head_at(layer, head) +
                    at / PAGE * cache.page_bytes();
    const int key = at % PAGE;
    T* keys = reinterpret_cast<T*>(page) + key * PAIR;
    T* values = reinterpret_cast<T*>(page) + PAGE * dim + int64_t(key / PAIR) * dim * PAIR + key % PAIR;
    for (int d = 0; d < dim; d += PAIR) __builtin_memcpy(keys + d * PAGE, k + d, 4);
    if (PAIR == 1)
        __builtin_memcpy(values, v, dim * sizeof(T));
    else
        for (int d = 0; d < dim; d++) values[d * PAIR] = v[d];
}

static void store_row(const Cache& cache, const Batch& batch, int layer, const void* k, int64_t k_stride, const void* v,
                      int64_t v_stride, int row) {
    const int64_t slot = batch.slots[row];
    if (slot < 0) return;
    for (int head = 0; head < cache.kv_heads; head++) {
        const int64_t from_k = row * k_stride + int64_t(head) * cache.dim, from_v = row * v_stride + int64_t(head) * cache.dim;
        if (cache.is_bf16)
            store_head(cache, layer, head, slot, static_cast<const bf16*>(k) + from_k, static_cast<const bf16*>(v) + from_v);
        else
            store_head(cache, layer, head, slot, static_cast<const float*>(k) + from_k, static_cast<const float*>(v) + from_v);
    }
}
