// Paged attention over the cache in place: an item of work, tile by tile. Included for each instruction set, in its
// namespace.

/// One page of one KV head; pages count from position 0.
INLINE const uint8_t* page_at(const Cache& cache, const Attend& job, const Item& item, int head, int page) {
    const int per_block = cache.block_size / PAGE;
    return cache.pool + item.table[page / per_block] * cache.block_bytes + cache.head_at(job.layer, item.head + head) +
           page % per_block * cache.page_bytes();
}

INLINE int pages_upto(int position) { return (position + PAGE - 1) / PAGE; }

/// End of the tile of `page`, in this item.
INLINE int tile_end(const Item& item, int page) {
    const int end = (page / PAGES + 1) * PAGES, last = pages_upto(item.end);
    return end < last ? end : last;
}

INLINE void start(Ahead& ahead, const Item* item) {
    ahead.item = item;
    if (!item) return;
    ahead.head = 0, ahead.page = item->begin / PAGE, ahead.page_end = tile_end(*item, ahead.page);
}

/// The next page in the order in which items read pages: by tile, head, page. Null: there is none.
INLINE const uint8_t* advance(Ahead& ahead, const Cache& cache, const Attend& job) {
    if (!ahead.item) return nullptr;
    const Item& item = *ahead.item;
    const uint8_t* found = page_at(cache, job, item, ahead.head, ahead.page);
    if (++ahead.page < ahead.page_end) return found;
    if (++ahead.head < item.heads) {
        const int begin = (ahead.page_end - 1) / PAGES * PAGES, first = item.begin / PAGE;
        ahead.page = begin > first ? begin : first;
    } else if (ahead.page_end < pages_upto(item.end)) {
        ahead.head = 0, ahead.page_end = tile_end(item, ahead.page);
    } else {
        start(ahead, ahead.following);
        ahead.following = nullptr;
    }
    return found;
}

INLINE void fetch_page(const uint8_t* page, int64_t bytes) {
    if (!page) return;
    for (int64_t at = 0; at < bytes; at += 64) fetch(page + at);
}

/// Calls fn(row of the item, row of the batch, query head) for all rows of an item, KV head by KV head.
template <class Fn>
INLINE void each_row(const Item& item, int group, const Fn& fn) {
    int row = 0;
    for (int head = item.head; head < item.head + item.heads; head++)
        for (int t = 0; t < item.num_tokens; t++)
            for (int g = 0; g < group; g++) fn(row++, item.tokens[t], head * group + g);
}

INLINE int lowest_seen(const Attend& job, int high) { return job.window > 0 && high > job.window ? high - job.window : 0; }

INLINE float* state_of(const Cache& cache, const Attend& job, const Plan& plan, int64_t state, int head) {
    return plan.states + (state * job.heads + head) * (STATE_HEADER + cache.dim);
}

INLINE void copy(float* to, const float* from, int count) {
    for (int i = 0; i < count; i += 16) store(to + i, load(from + i));
}

/// Loads the queries, the positions to which they attend, and their states.
template <class M>
static void enter(const Cache& cache, const Attend& job, const Plan& plan, const Item& item, Scratch& mine) {
    typedef typename M::T T;
    typedef typename M::C C;
    const int dim = cache.dim;
    each_row(item, job.heads / cache.kv_heads, [&](int row, int token, int head) {
        const T* q = static_cast<const T*>(job.q) + token * job.q_stride + int64_t(head) * dim;
        C* to = reinterpret_cast<C*>(mine.q) + row * (Q_PITCH / M::WIDTH);
        for (int d = 0; d < dim; d += 16) M::put(to, d, load(q + d));
        mine.high[row] = plan.positions[token] + 1;
        mine.low[row] = lowest_seen(job, mine.high[row]);
        mine.top[row] = LOWEST, mine.total[row] = 0;
        if (!item.resumes) return;
        const float* state = state_of(cache, job, plan, plan.state_at[token], head);
        mine.top[row] = state[0], mine.total[row] = state[1];
        copy(mine.sums + int64_t(row) * dim, state + STATE_HEADER, dim);
    });
}

/// Writes results, or states for later items.
template <class M>
static void leave(const Cache& cache, const Attend& job, const Plan& plan, const Item& item, Scratch& mine) {
    typedef typename M::T T;
    const int dim = cache.dim;
    alignas(64) float inverse[ITEM_ROWS + 16];
    const int rows = item.heads * item.num_tokens * (job.heads / cache.kv_heads);
    if (!item.leaves)
        for (int row = 0; row < rows; row += 16) store(inverse + row, div(set1(1.0f), load(mine.total + row)));
    each_row(item, job.heads / cache.kv_heads, [&](int row, int token, int head) {
        const float* sums = mine.sums + int64_t(row) * dim;
        if (item.leaves) {
            float* state = state_of(cache, job, plan, plan.state_at[token], head);
            state[0] = mine.top[row], state[1] = mine.total[row];
            return copy(state + STATE_HEADER, sums, dim);
        }
        T* to = static_cast<T*>(job.out) + (int64_t(token) * job.heads + head) * dim;
        for (int d = 0; d < dim; d += 16) store(to + d, mul(load(sums + d), set1(inverse[row])));
    });
}

/// Writes the states of one tile, for the rows that attend to it; the next tile starts from zero.
static void leave_apart(const Cache& cache, const Attend& job, const Plan& plan, const Item& item, int tile,
                        Scratch& mine) {
    each_row(item, job.heads / cache.kv_heads, [&](int row, int token, int head) {
        const int first = mine.low[row] / TILE;
        if (tile >= first && tile * TILE < mine.high[row]) {
            float* state = state_of(cache, job, plan, plan.state_at[token] + tile - first, head);
            state[0] = mine.top[row], state[1] = mine.total[row];
            copy(state + STATE_HEADER, mine.sums + int64_t(row) * cache.dim, cache.dim);
        }
        mine.top[row] = LOWEST, mine.total[row] = 0;
    });
}

/// Finds the positions of the tile to which the rows of the strip attend; false: none.
INLINE bool find_keys(Strip& strip, const Scratch& mine) {
    int low = mine.low[strip.first], high = mine.high[strip.first], most = low, least = high;
    for (int row = strip.first + 1; row < strip.first + strip.rows; row++) {
        low = mine.low[row] < low ? mine.low[row] : low, most = mine.low[row] > most ? mine.low[row] : most;
        high = mine.high[row] > high ? mine.high[row] : high, least = mine.high[row] < least ? mine.high[row] : least;
    }
    low -= strip.begin, high -= strip.begin;
    strip.keys = high < TILE ? high : TILE;
    strip.page_begin = low > 0 ? low / PAGE : 0;
    strip.page_end = pages_upto(strip.keys);
    strip.masked = most - strip.begin > strip.page_begin * PAGE || least - strip.begin < strip.page_end * PAGE;
    return high > 0 && low < TILE;
}

/// Computes the rows [begin, end) of an item, which share a KV head, over the tile of the strip.
template <class M>
INLINE void head_rows(const Cache& cache, const Attend& job, Strip& strip, int begin, int end,
                      const uint8_t* const* ahead, int num_ahead, Scratch& mine) {
    const int strips = (end - begin + MAX_ROWS - 1) / MAX_ROWS;
    int fetched = 0;
    for (int s = 0; s < strips; s++) {
        strip.first = begin + s * MAX_ROWS;
        strip.rows = end - strip.first < MAX_ROWS ? end - strip.first : MAX_ROWS;
        if (strips > 1 || !fetches(strip.rows))
            for (; fetched < num_ahead * (s + 1) / strips; fetched++) fetch_page(ahead[fetched], cache.page_bytes());
        if (find_keys(strip, mine)) any_strip<M>(strip, job, cache.dim, mine);
    }
}

/// Bytes to prefetch ahead: enough to hide the latency of memory; 16 to 256 KiB are equally fast.
constexpr int AHEAD_BYTES = 32 << 10;

template <class M>
static void attend_item(const Cache& cache, const Attend& job, const Plan& plan, const Item& item,
                        const Item* following, Ahead& ahead, Scratch& mine) {
    const int rows = item.num_tokens * (job.heads / cache.kv_heads);  // of a KV head
    const int last = pages_upto(item.end);
    enter<M>(cache, job, plan, item, mine);
    const bool expected = ahead.item == &item;
    if (!expected) start(ahead, &item);
    ahead.following = ahead.item == &item ? following : nullptr;
    if (!expected)
        for (int64_t bytes = 0; bytes < AHEAD_BYTES; bytes += cache.page_bytes())
            fetch_page(advance(ahead, cache, job), cache.page_bytes());
    Strip strip;
    strip.fresh = !item.resumes;
    for (int tile = item.begin / TILE; tile * TILE < item.end; tile++) {
        strip.begin = tile * TILE;
        const int first = tile * PAGES > item.begin / PAGE ? tile * PAGES : item.begin / PAGE;
        const int stop = last < (tile + 1) * PAGES ? last : (tile + 1) * PAGES;
        for (int head = 0; head < item.heads; head++) {
            const uint8_t* next[PAGES];
            for (int page = first; page < stop; page++) {
                const int p = page - tile * PAGES;
                strip.page[p] = page_at(cache, job, item, head, page);
                next[page - first] = advance(ahead, cache, job);
                strip.next[p] = rows <= MAX_ROWS && next[page - first] ? next[page - first] : strip.page[p];
            }
            head_rows<M>(cache, job, strip, head * rows, (head + 1) * rows, next, stop - first, mine);
        }
        strip.fresh = item.apart;
        if (item.apart) leave_apart(cache, job, plan, item, tile, mine);
    }
    if (!item.apart) leave<M>(cache, job, plan, item, mine);
}

static void attend(const Cache& cache, const Attend& job, const Plan& plan, const Item& item, const Item* following,
                   Ahead& ahead) {
    static thread_local Scratch here;
    Scratch* mine = &here;
    asm volatile("" : "+r"(mine));  // otherwise the compiler reloads the address in the innermost loops
    if (!cache.is_bf16) return attend_item<Single>(cache, job, plan, item, following, ahead, *mine);
#if TM_BF16
    attend_item<Dot>(cache, job, plan, item, following, ahead, *mine);
#else
    attend_item<Widen>(cache, job, plan, item, following, ahead, *mine);
#endif
}

/// Merges, in order, the tiles of a row that were computed separately.
template <class T>
static void reduce_row(const Cache& cache, const Attend& job, const Plan& plan, int token) {
    const int dim = cache.dim, high = plan.positions[token] + 1, first = lowest_seen(job, high) / TILE;
    for (int head = 0; head < job.heads; head++) {
        float top[16], total[16], old_scale[16], new_scale[16];
        alignas(64) float sums[MAX_DIM];
        store(top, set1(LOWEST));
        store(total, zero());
        for (int tile = first; tile * TILE < high; tile++) {
            const float* state = state_of(cache, job, plan, plan.state_at[token] + tile - first, head);
            merge(top, total, set1(state[0]), set1(state[1]), old_scale, new_scale);
            const F before = set1(old_scale[0]), fresh = set1(new_scale[0]);
            for (int d = 0; d < dim; d += 16) {
                const F x = mul(load(state + STATE_HEADER + d), fresh);
                store(sums + d, tile == first ? x : fma(load(sums + d), before, x));
            }
        }
        T* to = static_cast<T*>(job.out) + (int64_t(token) * job.heads + head) * dim;
        const F inverse = div(set1(1.0f), load(total));
        for (int d = 0; d < dim; d += 16) store(to + d, mul(load(sums + d), inverse));
    }
}

static void reduce(const Cache& cache, const Batch&, const Attend& job, const Plan& plan, int token) {
    if (cache.is_bf16)
        reduce_row<bf16>(cache, job, plan, token);
    else
        reduce_row<float>(cache, job, plan, token);
}
