// Paged attention over the cache in place: some rows over one tile. Included for each instruction set, in its
// namespace.
//
// The keys of a row are cut into tiles of 128 positions from position 0. Each tile has its own (maximum, total, sums
// of V), and tiles are merged in order. Each sum of a tile runs in the order of the keys or of the dimensions, in one
// lane, so neither the other rows, nor the item of the tile, nor the thread changes a bit. A masked position adds
// exactly zero, and so does merging a tile in which a row attends to no key.

/// bf16 pairs, with the bf16 dot product of the CPU.
#if TM_BF16
struct Dot {
    typedef bf16 T;                          // as stored
    typedef uint32_t C;                      // a coefficient: dimensions of a query, or weights of a row
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

// Number of sums in registers: enough to hide the latency of an addition.
#if TM_AVX512
constexpr int MAX_ROWS = 12;
constexpr int pages_at_once(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }
constexpr int vectors_at_once(int rows) { return rows <= 2 ? 8 : rows == 3 ? 6 : rows == 4 ? 5 : rows <= 6 ? 4 : 2; }
#else
constexpr int MAX_ROWS = 4;
constexpr int pages_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
/// Few rows compute so little per byte that they wait for memory, so their loops prefetch later pages.
constexpr bool fetches(int rows) { return rows <= 6; }

constexpr int PAGES = TILE / PAGE;
constexpr int Q_PITCH = MAX_DIM + 16;  // elements; a constant, and no power of 2, which would map rows to the same cache sets
constexpr float LOWEST = -1e30f;  // less than any score, and finite: LOWEST - LOWEST is 0

/// The memory of a thread.
struct Scratch {
    alignas(64) float q[(ITEM_ROWS + MAX_ROWS) * Q_PITCH];
    alignas(64) float sums[ITEM_ROWS * MAX_DIM];
    alignas(64) float scores[MAX_ROWS * TILE];
    alignas(64) float weights[MAX_ROWS * TILE];
    float top[ITEM_ROWS + 16], total[ITEM_ROWS + 16];
    int low[ITEM_ROWS], high[ITEM_ROWS];  // positions that a row attends to
};

/// Some rows of an item over one tile.
struct Strip {
    int first, rows;              // within the item
    int begin;                    // the tile's first position
    int page_begin, page_end;     // of the tile, to which any row attends
    int keys;                     // of the tile, from its begin to the last to which any row attends
    bool masked;                  // some row does not attend to all of these pages
    bool fresh;                   // the sums of the rows are not initialised
    const uint8_t* page[PAGES];
    const uint8_t* next[PAGES];   // pages to prefetch
    float old_scale[16], new_scale[16];
};

INLINE void fetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

/// Products of R queries with the keys of P pages.
template <class M, int R, int P>
INLINE void score_pages(const uint8_t* const* page, const uint8_t* const* next, const typename M::C* q, int dim,
                        float* out) {
    F acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) acc[r][p] = zero();
    }
    for (int i = 0; i < dim / M::PAIR; i++) {
        U x[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            x[p] = load_u(page[p] + i * 64);
            if (fetches(R)) fetch(next[p] + i * 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) acc[r][p] = M::mac(acc[r][p], x[p], q + r * (Q_PITCH / M::WIDTH), i);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) store(out + r * TILE + p * PAGE, acc[r][p]);
    }
}

/// Products of R queries with the keys of a tile.
template <class M, int R>
INLINE void scores_of(const Strip& strip, const typename M::C* q, int dim, float* out) {
    constexpr int P = pages_at_once(R);
    int at = strip.page_begin;
    const int end = strip.page_end;
    for (; at + P <= end; at += P) score_pages<M, R, P>(strip.page + at, strip.next + at, q, dim, out + at * PAGE);
    if (P > 4 && at + 4 <= end) {
        score_pages<M, R, 4>(strip.page + at, strip.next + at, q, dim, out + at * PAGE);
        at += 4;
    }
    if (P > 2 && at + 2 <= end) {
        score_pages<M, R, 2>(strip.page + at, strip.next + at, q, dim, out + at * PAGE);
        at += 2;
    }
    if (P > 1 && at < end) score_pages<M, R, 1>(strip.page + at, strip.next + at, q, dim, out + at * PAGE);
}

/// Scores become cap * tanh(scale * score / cap).
INLINE void cap_scores(const Strip& strip, const Attend& job, float* scores) {
    const F scale = set1(job.scale / job.softcap), cap = set1(job.softcap);
    for (int page = strip.page_begin; page < strip.page_end; page++)
        store(scores + page * PAGE, mul(tanh(mul(load(scores + page * PAGE), scale)), cap));
}

/// A row attends to the positions [low, high) of a tile; all other scores, which may be anything, become LOWEST.
INLINE void hide(const Strip& strip, int low, int high, float* scores) {
    for (int page = strip.page_begin; page < strip.page_end; page++) {
        const int at = page * PAGE;
        if (low > at || high < at + PAGE) store(scores + at, keep(load(scores + at), low - at, high - at, set1(LOWEST)));
    }
}

/// Merges the (maximum, total) of tiles into those of earlier tiles, lane by lane; returns the factors of both sums.
INLINE void merge(float* top, float* total, F new_top, F new_total, float* old_scale, float* new_scale) {
    const F before = load(top), both = max(before, new_top);
    const F a = exp2<7>(sub(before, both)), b = exp2<7>(sub(new_top, both));
    store(top, both);
    store(total, fma(load(total), a, mul(new_total, b)));
    store(old_scale, a);
    store(new_scale, b);
}

/// The scores of R rows become weights; their maxima (as powers of 2) and totals are merged into those of the item.
template <class M, int R>
INLINE void weigh(Strip& strip, const Attend& job, Scratch& mine) {
    typename M::C* weights = reinterpret_cast<typename M::C*>(mine.weights);
    if (job.softcap > 0)
        for (int r = 0; r < strip.rows; r++) cap_scores(strip, job, mine.scores + r * TILE);
    if (strip.masked)
        for (int r = 0; r < strip.rows; r++)
            hide(strip, mine.low[strip.first + r] - strip.begin, mine.high[strip.first + r] - strip.begin,
                 mine.scores + r * TILE);
    F of[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) of[r] = set1(LOWEST / 2);  // so that weights are 0 if all positions are masked
    for (int page = strip.page_begin; page < strip.page_end; page++) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) of[r] = max(of[r], load(mine.scores + r * TILE + page * PAGE));
    }
    const F unit = set1(job.softcap > 0 ? LOG2E : job.scale * LOG2E);
    const F tops = mul(across<Max, R>(of), unit);
    alignas(64) float below[16];
    store(below, sub(zero(), tops));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) of[r] = zero();
    for (int page = strip.page_begin; page < strip.page_end; page++) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const F p = exp2<M::EXP_TERMS>(fma(load(mine.scores + r * TILE + page * PAGE), unit, set1(below[r])));
            of[r] = add(of[r], p);
            M::put(weights + r * (TILE / M::WIDTH), page * PAGE, p);
        }
    }
    // Lanes after this strip belong to the next strip: nothing is merged into them.
    merge(mine.top + strip.first, mine.total + strip.first, keep(tops, 0, strip.rows, set1(LOWEST)),
          keep(across<Add, R>(of), 0, strip.rows, zero()), strip.old_scale, strip.new_scale);
}

/// Weighted sums of V over a tile, for D vectors of the dimensions from vector `at` on.
template <class M, int R, int D>
INLINE void sum_vectors(const Strip& strip, const typename M::C* weights, int dim, int at, float* sums) {
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
                if (fetches(R)) fetch(next + d * 64);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
                for (int d = 0; d < D; d++) acc[r][d] = M::mac(acc[r][d], x[d], weights + r * PITCH, i);
            }
        }
        if (M::PAIR == 2 && keys < PAGE && keys % 2) {  // the second key of the pair may be unwritten
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
        float* to = sums + r * dim + at * 16;
        const F before = set1(strip.old_scale[r]), fresh = set1(strip.new_scale[r]);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) {
            const F x = mul(acc[r][d], fresh);
            store(to + d * 16, strip.fresh ? x : fma(load(to + d * 16), before, x));
        }
    }
}

/// Weighted sums of V for `count` <= D vectors.
template <class M, int R, int D>
INLINE void sum_some(const Strip& strip, const typename M::C* weights, int dim, int at, int count, float* sums) {
    if (count == D) return sum_vectors<M, R, D>(strip, weights, dim, at, sums);
    if constexpr (D > 1) sum_some<M, R, D - 1>(strip, weights, dim, at, count, sums);
}

/// R rows over one tile.
template <class M, int R>
static __attribute__((noinline)) void strip_of(Strip& strip, const Attend& job, int dim, Scratch& mine) {
    typedef typename M::C C;
    scores_of<M, R>(strip, reinterpret_cast<const C*>(mine.q) + strip.first * (Q_PITCH / M::WIDTH), dim, mine.scores);
    weigh<M, R>(strip, job, mine);
    constexpr int D = vectors_at_once(R);
    for (int at = 0, left = dim / 16; left > 0;) {
        const int count = (left + (left + D - 1) / D - 1) / ((left + D - 1) / D);  // equal parts
        sum_some<M, R, D>(strip, reinterpret_cast<const C*>(mine.weights), dim, at, count,
                          mine.sums + int64_t(strip.first) * dim);
        at += count, left -= count;
    }
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
