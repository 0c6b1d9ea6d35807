// The small operations between matrix products, a row at a time. They round where kernels/ops_reference.py
// rounds. Included once for each instruction set, inside its namespace.

/// The value after a store and a load: rounded to T.
template <class T>
INLINE F rounded(F x) {
    T stored[16];
    store(stored, x);
    return load(stored);
}

/// 1 / rms of a row: each lane sums its columns in order, then the lanes are summed.
template <class T>
INLINE F inverse_rms(const T* x, int cols, float eps) {
    F sum = zero();
    int i = 0;
    for (; i + 16 <= cols; i += 16) sum = fma(load(x + i), load(x + i), sum);
    if (i < cols) {
        const F part = load_part(x + i, cols - i);
        sum = fma(part, part, sum);
    }
    return set1(1.0f / __builtin_sqrtf(hsum(sum) / float(cols) + eps));
}

template <class T, class W>
constexpr bool is_wide = true;
template <class T>
constexpr bool is_wide<T, T> = false;

/// x * scale * weight. A weight of the type of x multiplies after the rounding; fp32 beside bf16 multiplies before.
template <class T, class W>
INLINE void scale_row(const T* x, const W* weight, T* out, int cols, F scale) {
    const auto one = [&](F value, F w) { return mul(is_wide<T, W> ? mul(value, scale) : rounded<T>(mul(value, scale)), w); };
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, one(load(x + i), load(weight + i)));
    if (i < cols) store_part(out + i, one(load_part(x + i, cols - i), load_part(weight + i, cols - i)), cols - i);
}

/// residual += x (unless x is null); out = norm(residual) * weight.
template <class T, class W>
static void add_rms_norm_row(const T* x, T* residual, const W* weight, T* out, int cols, float eps) {
    if (x) {
        int i = 0;
        for (; i + 16 <= cols; i += 16) store(residual + i, add(load(x + i), load(residual + i)));
        if (i < cols)
            store_part(residual + i, add(load_part(x + i, cols - i), load_part(residual + i, cols - i)), cols - i);
    }
    scale_row(residual, weight, out, cols, inverse_rms(residual, cols, eps));
}

static void add_rms_norm(const void* x, void* residual, const void* weight, void* out, int cols, float eps,
                         bool is_bf16, bool wide_weight) {
    if (is_bf16 && wide_weight)
        add_rms_norm_row(static_cast<const bf16*>(x), static_cast<bf16*>(residual), static_cast<const float*>(weight),
                         static_cast<bf16*>(out), cols, eps);
    else if (is_bf16)
        add_rms_norm_row(static_cast<const bf16*>(x), static_cast<bf16*>(residual), static_cast<const bf16*>(weight),
                         static_cast<bf16*>(out), cols, eps);
    else
        add_rms_norm_row(static_cast<const float*>(x), static_cast<float*>(residual),
                         static_cast<const float*>(weight), static_cast<float*>(out), cols, eps);
}

struct Silu {
    /// log2 of e^-x.
    INLINE F power(F x) { return mul(x, set1(-LOG2E)); }
};

struct Gelu {
    /// log2 of e^-2y, y = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of GELU, (1 + tanh(y)) / 2 = 1 / (1 + e^-2y).
    INLINE F power(F x) {
        constexpr float linear = -2.0f * 0.797884561f * LOG2E;
        return mul(x, fma(mul(x, x), set1(linear * 0.044715f), set1(linear)));
    }
};

/// gate / (1 + 2^power(gate)) * up.
template <class T, class Act>
INLINE F gate_mul16(F gate, F up) {
    const F e = exp2<7>(min(set1(200.0f), Act::power(gate)));
    return mul(rounded<T>(div(gate, add(e, set1(1.0f)))), up);
}

template <class Act, class T>
static void gate_mul_row(const T* gate, T* out, int cols) {
    const T* up = gate + cols;
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, gate_mul16<T, Act>(load(gate + i), load(up + i)));
    if (i < cols)
        store_part(out + i, gate_mul16<T, Act>(load_part(gate + i, cols - i), load_part(up + i, cols - i)), cols - i);
}

template <class Act>
static void gate_mul(const void* gate_up, void* out, int cols, bool is_bf16) {
    if (is_bf16)
        gate_mul_row<Act>(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), cols);
    else
        gate_mul_row<Act>(static_cast<const float*>(gate_up), static_cast<float*>(out), cols);
}

static void silu_mul(const void* gate_up, void* out, int cols, bool is_bf16) {
    gate_mul<Silu>(gate_up, out, cols, is_bf16);
}

static void gelu_mul(const void* gate_up, void* out, int cols, bool is_bf16) {
    gate_mul<Gelu>(gate_up, out, cols, is_bf16);
}

/// x = cap * tanh(x / cap).
template <class T>
static void softcap_row(T* x, int cols, float cap) {
    const auto one = [&](F value) { return mul(tanh(div(value, set1(cap))), set1(cap)); };
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(x + i, one(load(x + i)));
    if (i < cols) store_part(x + i, one(load_part(x + i, cols - i)), cols - i);
}

static void softcap(void* x, int cols, float cap, bool is_bf16) {
    if (is_bf16)
        softcap_row(static_cast<bf16*>(x), cols, cap);
    else
        softcap_row(static_cast<float*>(x), cols, cap);
}

INLINE float value(float x) { return x; }
INLINE float value(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

/// The first index of the highest value of a row, and whether all its values are finite.
template <class T>
static void argmax_row(const T* x, int cols, int64_t* place, bool* finite) {
    constexpr int RUN = 512;
    const F lowest = set1(-__builtin_inff());
    F non_finite = zero();  // x * 0 is NaN for what is not finite
    float best = -__builtin_inff();
    int run = 0;
    for (int begin = 0; begin < cols; begin += RUN) {
        const int end = cols - begin < RUN ? cols : begin + RUN;
        F top = lowest;
        int i = begin;
        for (; i + 16 <= end; i += 16) {
            const F v = load(x + i);
            non_finite = fma(v, zero(), non_finite);
            top = max(top, v);
        }
        if (i < end) {
            const F v = load_part(x + i, end - i);
            non_finite = fma(v, zero(), non_finite);
            top = max(top, keep(v, 0, end - i, lowest));
        }
        const float high = hmax(top);
        if (high > best) best = high, run = begin;
    }
    while (run < cols - 1 && !(value(x[run]) == best)) run++;
    *place = run;
    *finite = hsum(non_finite) == 0.0f;
}

static void argmax(const void* x, int cols, bool is_bf16, int64_t* place, bool* finite) {
    if (is_bf16)
        argmax_row(static_cast<const bf16*>(x), cols, place, finite);
    else
        argmax_row(static_cast<const float*>(x), cols, place, finite);
}

/// Quantises a row to integers from -127 to 127, stored plus 128; its step is NaN if a value is not finite.
template <class T>
static void quantize_row(const T* x, uint8_t* out, float* step, int cols) {
    F top = zero(), non_finite = zero();
    for (int i = 0; i < cols; i += 16) {
        const F v = cols - i < 16 ? load_part(x + i, cols - i) : load(x + i);
        top = max(top, max(v, sub(zero(), v)));
        non_finite = fma(v, zero(), non_finite);
    }
    const float high = hmax(top), inverse = high > 0 ? 127.0f / high : 0.0f;
    *step = hsum(non_finite) == 0.0f ? high / 127.0f : __builtin_nanf("");
    for (int i = 0; i < cols; i += 16) {
        const int n = cols - i < 16 ? cols - i : 16;
        F v = round_whole(mul(n < 16 ? load_part(x + i, n) : load(x + i), set1(inverse)));
        v = add(min(max(v, set1(-127.0f)), set1(127.0f)), set1(128.0f));
        if (n == 16) {
            store_bytes(out + i, v);
        } else {
            uint8_t bytes[16];
            store_bytes(bytes, v);
            for (int j = 0; j < n; j++) out[i + j] = bytes[j];
        }
    }
}

static void quantize(const void* x, uint8_t* out, float* step, int cols, bool is_bf16) {
    if (is_bf16)
        quantize_row(static_cast<const bf16*>(x), out, step, cols);
    else
        quantize_row(static_cast<const float*>(x), out, step, cols);
}

/// Rotates pairs (i, i + dim / 2) of one head.
template <class T>
INLINE void rotate(T* x, const float* cos, const float* sin, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F c = n == 16 ? load(cos + i) : load_part(cos + i, n), s = n == 16 ? load(sin + i) : load_part(sin + i, n);
        const F a = n == 16 ? load(x + i) : load_part(x + i, n);
        const F b = n == 16 ? load(x + half + i) : load_part(x + half + i, n);
        const F first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
        if (n == 16) {
            store(x + i, first);
            store(x + half + i, second);
        } else {
            store_part(x + i, first, n);
            store_part(x + half + i, second, n);
        }
    }
}

/// Norms and rotation of the queries and keys of a row in place, then K and V into the cache.
template <class T>
INLINE void write_row_as(const Cache& cache, const Batch& batch, const Write& job, int row) {
    const int64_t slot = batch.slots[row];
    if (slot < 0) return;
    const int dim = cache.dim, half = dim / 2;
    T* q = static_cast<T*>(job.qkv) + row * job.stride;
    T* k = q + int64_t(job.heads) * dim;
    T* v = k + int64_t(cache.kv_heads) * dim;
    for (T* x = q; x < v; x += dim) {
        const void* weight = x < k ? job.q_norm : job.k_norm;
        if (weight && job.wide_norms)
            scale_row(x, static_cast<const float*>(weight), x, dim, inverse_rms(x, dim, job.eps));
        else if (weight)
            scale_row(x, static_cast<const T*>(weight), x, dim, inverse_rms(x, dim, job.eps));
        if (job.cos) rotate(x, job.cos + int64_t(row) * half, job.sin + int64_t(row) * half, dim);
    }
    for (int head = 0; head < cache.kv_heads; head++)
        store_head(cache, job.layer, head, slot, k + int64_t(head) * dim, v + int64_t(head) * dim);
}

static void write_row(const Cache& cache, const Batch& batch, const Write& job, int row) {
    if (cache.is_bf16)
        write_row_as<bf16>(cache, batch, job, row);
    else
        write_row_as<float>(cache, batch, job, row);
}
