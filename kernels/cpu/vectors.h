// Vectors: W floats of the machine's own width. Arithmetic and comparisons are the compiler's vector extension.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int W = 4, REGISTERS = 32;
#else
constexpr int W = 4, REGISTERS = 16;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));
typedef uint16_t hvec __attribute__((vector_size(W * 2)));

constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline vec splat(float x) { return x - vec{}; }

inline vec load(const float* p) {
    vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// W integers of 16 bits, or of 8.
inline uvec load_wide(const uint16_t* p) {
    hvec x;
    std::memcpy(&x, p, sizeof x);
#if defined(__AVX2__) && !defined(__AVX512F__)  // for which compilers widen in halves
    return (uvec)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, uvec);
#endif
}

inline uvec load_wide(const uint8_t* p) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    uvec wide;
    for (int i = 0; i < W; ++i) wide[i] = p[i];
    return wide;
#endif
}

inline vec load(const bf16* p) { return bit_cast<vec>(load_wide(&p->bits) << 16); }

inline ivec load(const int32_t* p) {
    ivec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(int32_t* p, ivec x) { std::memcpy(p, &x, sizeof x); }

// Rounds to nearest even; a NaN stays one. Subnormal numbers may become zero.
inline void store(bf16* p, vec x) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &half, sizeof half);
#else
    uvec u = bit_cast<uvec>(x);
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec bits = x == x ? rounded : (u >> 16 | 0x40);
    hvec half = __builtin_convertvector(bits, hvec);
    std::memcpy(p, &half, sizeof half);
#endif
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has the integer in its low bits

// The nearest integers, to even; NaN becomes zero.
inline void store(int16_t* p, vec x) {
    hvec integers = __builtin_convertvector(bit_cast<uvec>((x == x ? x : vec{}) + ROUND), hvec);
    std::memcpy(p, &integers, sizeof integers);
}

// The first n < W elements; what lies beyond reads as zero and is not written.
template <class T>
inline auto load_some(const T* p, int n) {
    T some[W] = {};
    std::memcpy(some, p, n * sizeof(T));
    return load(some);
}

template <class T>
inline void store_some(T* p, vec x, int n) {
    T some[W];
    store(some, x);
    std::memcpy(p, some, n * sizeof(T));
}

// Calls body(i, loader, storer) for each run of W elements of a row of n, the last one cut short.
template <class Body>
inline void for_each_vec(int n, Body body) {
    int i = 0;
    for (; i + W <= n; i += W) body(i, [](auto* p) { return load(p); }, [](auto* p, vec x) { store(p, x); });
    if (int rest = n - i)
        body(i, [=](auto* p) { return load_some(p, rest); }, [=](auto* p, vec x) { store_some(p, x, rest); });
}

inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Words: 32 bits of neighbouring elements, one float, two bf16 or two int16 (to which int8 is widened), so that one
// instruction multiplies all of a lane.
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);
template <>
constexpr int PER_WORD<int8_t> = 2;

template <class T>
inline ivec load_words(const T* p) {
    ivec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline ivec load_words(const int8_t* p) {
#if defined(__AVX512BW__)
    return (ivec)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (ivec)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    int16_t wide[2 * W];
    for (int i = 0; i < 2 * W; ++i) wide[i] = p[i];
    return load_words(wide);
#endif
}

template <class T>
inline ivec splat_word(const T* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return word - ivec{};
}

// Words of numbers that are bf16 as they stand.
inline ivec join(vec first, vec second) {
    return bit_cast<ivec>(bit_cast<uvec>(first) >> 16 | (bit_cast<uvec>(second) & 0xffff0000u));
}
// The halves of words of two bf16.
inline vec low(ivec words) { return bit_cast<vec>(bit_cast<uvec>(words) << 16); }
inline vec high(ivec words) { return bit_cast<vec>(bit_cast<uvec>(words) & 0xffff0000u); }

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// total + the products of each word's elements.
template <class T>
inline vec dot(ivec a, ivec b, vec total);

template <>
inline vec dot<float>(ivec a, ivec b, vec total) {
    return fma(bit_cast<vec>(a), bit_cast<vec>(b), total);
}

template <>
inline vec dot<bf16>(ivec a, ivec b, vec total) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return fma(high(a), high(b), fma(low(a), low(b), total));
#endif
}

// The same exactly, of small integers as int16.
template <class T>
inline ivec dot(ivec a, ivec b, ivec total);

template <>
inline ivec dot<int8_t>(ivec a, ivec b, ivec total) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return total + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return total + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    auto first = [](ivec x) { return bit_cast<ivec>(bit_cast<uvec>(x) << 16) >> 16; };
    return total + first(a) * first(b) + (a >> 16) * (b >> 16);
#endif
}

// Keeps `b` where either is NaN.
inline vec max(vec a, vec b) { return a > b ? a : b; }

inline bool any(ivec x) {
    uint64_t words[W / 2], all = 0;
    std::memcpy(words, &x, sizeof words);
    for (uint64_t word : words) all |= word;
    return all != 0;
}

// Halves the vector until one lane is left: the one order of every horizontal reduction.
template <class Op>
inline float reduce(vec x, Op op) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#if defined(__AVX512F__)
    auto upper = (__m256)_mm512_extractf64x4_pd((__m512d)x, 1);
    __m256 eight = op(_mm512_castps512_ps256((__m512)x), upper);
#else
    __m256 eight = (__m256)x;
#endif
    __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = op(four, _mm_movehl_ps(four, four));
    return op(two, _mm_movehdup_ps(two))[0];
#else
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) x[i] = op(x[i], x[i + n]);
    return x[0];
#endif
}

inline float sum(vec x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}

inline float largest(vec x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

constexpr float LOWEST_EXPONENT = -87.33654f, LOG2_E = 1.44269504f;  // e^x is subnormal below the first

#if defined(__AVX512F__)
inline vec round(vec x) {
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// significand * 2^n, or 0 where x is below LOWEST_EXPONENT.
inline vec scale_or_zero(vec significand, vec n, vec x) {
    __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(LOWEST_EXPONENT), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(keep, (__m512)significand, (__m512)n);
}
#endif

// e^x to 1 ulp in [-87.3, 88.3]; below exactly 0, above inf, NaN stays NaN. Cody-Waite reduction to |f| <= ln2 / 2 and
// the polynomial of Cephes' expf.
inline vec exp(vec x) {
#if defined(__AVX512F__)
    constexpr float HIGHEST = 200.0f;  // whose result is inf
    vec c = (vec)_mm512_min_ps((__m512)splat(HIGHEST), (__m512)x);
    vec n = round(c * LOG2_E);
#else
    constexpr float HIGHEST = 88.72f, ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    vec c = x < LOWEST_EXPONENT ? splat(LOWEST_EXPONENT) : x;
    c = c > HIGHEST ? splat(HIGHEST) : c;
    vec shifted = fma(c, splat(LOG2_E), splat(ROUND));
    vec n = shifted - ROUND;
#endif
    vec f = fma(n, splat(-0.693359375f), c);
    f = fma(n, splat(2.12194440e-4f), f);
    vec p = splat(1.9875691500e-4f);
    p = fma(p, f, splat(1.3981999507e-3f));
    p = fma(p, f, splat(8.3334519073e-3f));
    p = fma(p, f, splat(4.1665795894e-2f));
    p = fma(p, f, splat(1.6666665459e-1f));
    p = fma(p, f, splat(5.0000001201e-1f));
    p = fma(p, f * f, f) + 1.0f;
#if defined(__AVX512F__)
    return scale_or_zero(p, n, x);
#else
    vec power = bit_cast<vec>((bit_cast<ivec>(shifted) << 23) + (127 << 23));  // 2^n
    return x < LOWEST_EXPONENT ? vec{} : p * power;
#endif
}

inline float exp(float x) { return exp(splat(x))[0]; }

// e^x of x <= 0, to be rounded to T.
template <class T>
inline vec exp_as(vec x) {
    return exp(x);
}

#if defined(__AVX512F__)
template <>
inline vec exp_as<bf16>(vec x) {  // relative error 1e-4: the best cubic for 2^f, |f| <= 1/2, found numerically
    vec n = round(x * LOG2_E);
    vec f = fma(x, splat(LOG2_E), -n);
    vec p = fma(fma(fma(splat(0.05500866f), f, splat(0.24221057f)), f, splat(0.69328291f)), f, splat(1.0f));
    return scale_or_zero(p, n, x);
}
#endif

// Absolute error about 1e-7, which is what a soft cap needs.
inline vec tanh(vec x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace
