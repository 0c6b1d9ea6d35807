// Matrix products y = x · W for any number of rows. Each element is one chain of sums over the inputs in ascending
// order, in every tile, so the bits of a row depend on the row only.
//
// W is stored in panels of 32 outputs, [inputs / n][32][n], where n is the number of inputs of a dot product: 2 in
// bf16, 4 in int8. A tile of rows takes two panels, or one if there are few rows. The panels stay in the second-level
// cache for all tiles; the sums of a tile stay in registers.

#if TM_BF16

constexpr int TILE_ROWS = 6;  // 6 × 4 sums, 4 weights and 1 input are 29 of 32 registers
constexpr int LANES = 16;
typedef int32_t I __attribute__((vector_size(64)));  // 16 integers

INLINE F dot(F acc, U weights, int x) { return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(x)); }
/// x holds 4 unsigned bytes.
INLINE I dot(I acc, U weights, int x) { return (I)_mm512_dpbusd_epi32((U)acc, _mm512_set1_epi32(x), weights); }

/// Computes the sums of M rows and N × 16 outputs, whose panels are `panel` bytes apart. Prefetches AHEAD lines of 64
/// bytes in each step.
template <int M, int N, int AHEAD, class Acc>
INLINE void multiply(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t panel, int steps, const uint8_t* fetched,
                     Acc (&sums)[M][N]) {
    Acc acc[M][N];  // not `sums` itself: compilers keep a local array in registers
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[m][n] = Acc{};
    for (int k = 0; k < steps; k++) {
        U weights[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) weights[n] = load_u(w + n / 2 * panel + n % 2 * 64);
#pragma GCC unroll 4
        for (int i = 0; i < AHEAD; i++) _mm_prefetch(reinterpret_cast<const char*>(fetched + 64 * i), _MM_HINT_T0);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            int pair;
            __builtin_memcpy(&pair, x + m * stride, 4);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[m][n] = dot(acc[m][n], weights[n], pair);
        }
        w += PANEL_STEP, x += 4, fetched += 64 * AHEAD;
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[m][n] = acc[m][n];
}

/// Converts sums to values.
INLINE F finish(const Product& p, int, int at, F sum) { return p.bias ? add(sum, load(p.bias + at)) : sum; }
INLINE F finish(const Product& p, int row, int at, I sum) {
    const F whole = _mm512_cvtepi32_ps(_mm512_sub_epi32((U)sum, load_u(p.offsets + at)));
    const F y = mul(whole, mul(load(p.scales + at), set1(p.x_scales[row])));
    return p.bias ? add(y, load(p.bias + at)) : y;
}

INLINE void put(bf16* out, F y, int room) {
    if (room >= LANES)
        store(out, y);
    else if (room > 0)
        store_part(out, y, room);
}

/// The data that a tile prefetches: none, its own later weights, or a part of the next panels.
enum Fetch { NOTHING, STREAM, FOLLOWING };

template <class Acc, int M, int N>
static void tile(const Product& p, int row, int column, Fetch fetch, int64_t ahead) {
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + row * p.x_stride;
    const int64_t panel = int64_t(p.steps) * PANEL_STEP;
    const uint8_t* w = static_cast<const uint8_t*>(p.weight) + column / PANEL * panel;
    Acc acc[M][N];
    if (fetch == STREAM)
        multiply<M, N, 2>(x, p.x_stride, w, panel, p.steps, w + ahead, acc);
    else if (fetch == FOLLOWING)
        multiply<M, N, 1>(x, p.x_stride, w, panel, p.steps, w + ahead, acc);
    else
        multiply<M, N, 0>(x, p.x_stride, w, panel, p.steps, w, acc);
    for (int m = 0; m < M; m++) {
        bf16* out = static_cast<bf16*>(p.out) + (row + m) * p.out_stride;
        if (p.gated) {
            for (int n = 0; n < N / 2; n++) {
                const int at = column / 2 + n * LANES;
                const F gate = rounded<bf16>(finish(p, row + m, column + n * LANES, acc[m][n]));
                const F up = rounded<bf16>(finish(p, row + m, column + (n + N / 2) * LANES, acc[m][n + N / 2]));
                put(out + at, gate_mul16<bf16, Silu>(gate, up), p.cols - at);
            }
        } else {
            for (int n = 0; n < N; n++) {
                const int at = column + n * LANES;
                put(out + at, finish(p, row + m, at, acc[m][n]), p.cols - at);
            }
        }
    }
}

template <class Acc, int N>
INLINE void tile_of(int rows, const Product& p, int row, int column, Fetch fetch, int64_t ahead) {
    switch (rows) {
        case 1: return tile<Acc, 1, N>(p, row, column, fetch, ahead);
        case 2: return tile<Acc, 2, N>(p, row, column, fetch, ahead);
        case 3: return tile<Acc, 3, N>(p, row, column, fetch, ahead);
        case 4: return tile<Acc, 4, N>(p, row, column, fetch, ahead);
        case 5: return tile<Acc, 5, N>(p, row, column, fetch, ahead);
        default: return tile<Acc, 6, N>(p, row, column, fetch, ahead);
    }
}

/// `ahead`: distance to the next panels; 0: the same panels.
template <class Acc, int N>
static void tiles(const Product& p, int row, int rows, int column, int64_t ahead) {
    const int count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int t = 0; t < count; t++) {
        const int size = rows / count + (t < rows % count);
        if (count == 1)
            tile_of<Acc, N>(size, p, row, column, N == 2 ? STREAM : NOTHING, FETCH_AHEAD);
        else
            tile_of<Acc, N>(size, p, row, column, ahead && t < N ? FOLLOWING : NOTHING, ahead + t * int64_t(64) * p.steps);
        row += size;
    }
}

static void matmul(const Product& p, int row, int rows, int column, int width, int64_t ahead) {
    if (p.scales)
        width == PANEL ? tiles<I, 2>(p, row, rows, column, ahead) : tiles<I, 4>(p, row, rows, column, ahead);
    else
        width == PANEL ? tiles<F, 2>(p, row, rows, column, ahead) : tiles<F, 4>(p, row, rows, column, ahead);
}

#endif
