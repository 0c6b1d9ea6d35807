// Vectors of 16 floats, on AVX-512 or on pairs of AVX2 registers. Included for each instruction set, in its namespace.
// Each lane of a result depends on the same lane of the inputs only, so equal inputs give equal bits.

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

typedef uint16_t bf16;

#if TM_AVX512

typedef __m512 F;   // 16 floats
typedef __m512i U;  // 64 bytes of memory

INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F set1(float x) { return _mm512_set1_ps(x); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE F add(F x, F y) { return _mm512_add_ps(x, y); }
INLINE F sub(F x, F y) { return _mm512_sub_ps(x, y); }
INLINE F mul(F x, F y) { return _mm512_mul_ps(x, y); }
INLINE F div(F x, F y) { return _mm512_div_ps(x, y); }
INLINE F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
/// max and min: if either argument is NaN, the result is y, so pass a value that may be NaN as y.
INLINE F max(F x, F y) { return _mm512_max_ps(x, y); }
INLINE F min(F x, F y) { return _mm512_min_ps(x, y); }
INLINE float hsum(F x) { return _mm512_reduce_add_ps(x); }
INLINE float hmax(F x) { return _mm512_reduce_max_ps(x); }
INLINE U load_u(const void* p) { return _mm512_loadu_si512(p); }
INLINE F as_float(U x) { return _mm512_castsi512_ps(x); }
/// The lower / upper bf16 of each 32-bit lane.
INLINE F even(U x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE F odd(U x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xFFFF0000))); }
INLINE U lower_half(U x) { return _mm512_and_si512(x, _mm512_set1_epi32(0x0000FFFF)); }
/// x in lanes [low, high), `other` elsewhere.
INLINE F keep(F x, int low, int high, F other) {
    const unsigned upto = high >= 16 ? 0xFFFFu : high <= 0 ? 0u : (1u << high) - 1;
    const unsigned below = low >= 16 ? 0xFFFFu : low <= 0 ? 0u : (1u << low) - 1;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(upto & ~below), other, x);
}
INLINE F load(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
/// Rounds to nearest even; NaN stays NaN.
INLINE void store(bf16* p, F x) {
#if TM_BF16
    const __m256i out = (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd_bit, _mm512_set1_epi32(0x7FFF)));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
    const __m256i out = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), out);
}
/// 2^floor(n) * x.
INLINE F scale2(F x, F n) { return _mm512_scalef_ps(x, n); }
/// x - floor(x), and 0 for infinities.
INLINE F fraction(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

struct Add {
    static INLINE_MEMBER F of(F x, F y) { return _mm512_add_ps(x, y); }
};
struct Max {
    static INLINE_MEMBER F of(F x, F y) { return _mm512_max_ps(x, y); }
};
/// Lane r: Op over the lanes of x[r], r < R <= 16, in the order of hsum and hmax; other lanes: undefined.
template <class Op, int R>
INLINE F across(F* x) {
#pragma GCC unroll 8
    for (int r = 0; r < (R < 8 ? R : 8); r++) {
        const F a = x[r], b = r + 8 < R ? x[r + 8] : a;
        x[r] = Op::of(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
#pragma GCC unroll 4
    for (int r = 0; r < (R < 4 ? R : 4); r++) {
        const F a = x[r], b = r + 4 < R ? x[r + 4] : a;
        x[r] = Op::of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
#pragma GCC unroll 2
    for (int r = 0; r < (R < 2 ? R : 2); r++) {
        const __m512d a = _mm512_castps_pd(x[r]), b = r + 2 < R ? _mm512_castps_pd(x[r + 2]) : a;
        x[r] = Op::of(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const F a = x[0], b = R > 1 ? x[1] : a;
    const F mixed = Op::of(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), mixed);
}
INLINE F round_whole(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/// Integers from 0 to 255, as bytes.
INLINE void store_bytes(uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
#if TM_BF16
INLINE F dot2(F acc, U pairs, uint32_t pair) {
    return _mm512_dpbf16_ps(acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)));
}
#endif

#else

struct F {
    __m256 a, b;
};
struct U {
    __m256i a, b;
};

INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE float hsum(F x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float hmax(F x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
INLINE U load_u(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE F as_float(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE __m256 even8(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE __m256 odd8(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
}
INLINE F even(U x) { return {even8(x.a), even8(x.b)}; }
INLINE F odd(U x) { return {odd8(x.a), odd8(x.b)}; }
INLINE U lower_half(U x) {
    const __m256i mask = _mm256_set1_epi32(0x0000FFFF);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE __m256 keep8(__m256 x, int low, int high, __m256 other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(high - 1)));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(out));
}
INLINE F keep(F x, int low, int high, F other) {
    return {keep8(x.a, low, high, other.a), keep8(x.b, low - 8, high - 8, other.b)};
}
INLINE __m256 load8(const bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
INLINE F load(const bf16* p) { return {load8(p), load8(p + 8)}; }
INLINE __m256i round8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd_bit, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC00000), nan), 16);
}
/// Rounds to nearest even; NaN stays NaN.
INLINE void store(bf16* p, F x) {
    const __m256i packed = _mm256_packus_epi32(round8(x.a), round8(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
/// x times a power of 2. Below the normal range the result is 0; above it, infinity. NaN stays.
INLINE __m256 scale2_8(__m256 x, __m256 n) {
    n = _mm256_floor_ps(n);
    const __m256 low = _mm256_set1_ps(-126.0f), high = _mm256_set1_ps(128.0f);
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(n, low), high));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
    return _mm256_and_ps(_mm256_mul_ps(x, power), _mm256_cmp_ps(n, low, _CMP_NLT_UQ));
}
INLINE F scale2(F x, F n) { return {scale2_8(x.a, n.a), scale2_8(x.b, n.b)}; }
INLINE __m256 fraction8(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-3e38f), x);  // NaN stays
    return _mm256_sub_ps(x, _mm256_floor_ps(x));
}
INLINE F fraction(F x) { return {fraction8(x.a), fraction8(x.b)}; }

struct Add {
    static INLINE_MEMBER float of(F x) { return hsum(x); }
};
struct Max {
    static INLINE_MEMBER float of(F x) { return hmax(x); }
};
/// Lane r: Op over the lanes of x[r], r < R <= 16; other lanes are undefined.
template <class Op, int R>
INLINE F across(F* x) {
    float out[16] = {};
    for (int r = 0; r < R; r++) out[r] = Op::of(x[r]);
    return load(out);
}
/// Integers from 0 to 255, as bytes.
INLINE void store_bytes(uint8_t* p, F x) {
    const __m256i words = _mm256_packus_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
INLINE F round_whole(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

#endif

/// 2^x for x below 2^127; 0 for -infinity, NaN for NaN. A polynomial in the fraction of x, 1 at 0, with the least
/// maximum relative error on [0, 1] (Remez): below 2^-26 with 7 terms, below 2^-18 with 5, plus the rounding of fp32.
template <int TERMS>
INLINE F exp2(F x) {
    static_assert(TERMS == 5 || TERMS == 7, "the coefficients below");
    const F f = fraction(x);
    F y;
    if (TERMS == 7) {
        y = fma(set1(2.1612913e-4f), f, set1(1.2467847e-3f));
        y = fma(y, f, set1(9.6754516e-3f));
        y = fma(y, f, set1(5.5485282e-2f));
        y = fma(y, f, set1(2.4022931e-1f));
        y = fma(y, f, set1(6.9314706e-1f));
    } else {
        y = fma(set1(1.3426685e-2f), f, set1(5.2242473e-2f));
        y = fma(y, f, set1(2.4128020e-1f));
        y = fma(y, f, set1(6.9304484e-1f));
    }
    return scale2(fma(y, f, set1(1.0f)), x);
}

constexpr float LOG2E = 1.44269504f;

/// tanh(x) = 1 - 2 / (e^2x + 1).
INLINE F tanh(F x) {
    return sub(set1(1.0f), div(set1(2.0f), add(exp2<7>(min(set1(200.0f), mul(x, set1(2.0f * LOG2E)))), set1(1.0f))));
}

/// The first n < 16 elements, then zeros; for the ends of rows.
template <class T>
INLINE F load_part(const T* p, int n) {
    T part[16] = {};
    for (int i = 0; i < n; i++) part[i] = p[i];
    return load(part);
}
template <class T>
INLINE void store_part(T* p, F x, int n) {
    T part[16];
    store(part, x);
    for (int i = 0; i < n; i++) p[i] = part[i];
}
