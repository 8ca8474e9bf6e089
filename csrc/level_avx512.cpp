// AVX-512, 16 lanes. Compiled with -mavx512f; called only where dispatch.cpp saw it.
//
// On a machine without AVX-512 the tests run these loops, widths and tails in level_lanes16.cpp, and all but the policy
// below; on one that has it they run this level as well.
#include <immintrin.h>

#include "level_body.h"

namespace {

struct Avx512 {
    using V = __m512;
    typedef std::uint32_t U __attribute__((vector_size(64)));
    typedef std::int32_t I __attribute__((vector_size(64)));
    static constexpr std::int64_t lanes = 16;
    static constexpr int batch = 2;  // two cache lines of floats
    static V load(const float *from) { return _mm512_loadu_ps(from); }
    static void store(float *to, V value) { _mm512_storeu_ps(to, value); }
    static V splat(float value) { return _mm512_set1_ps(value); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V sqrt(V value) { return _mm512_sqrt_ps(value); }
    static U bits(V value) { return (U)value; }
    static V floats(U bits) { return (V)bits; }
    static U splat_bits(std::uint32_t bits) { return (U)_mm512_set1_epi32(static_cast<int>(bits)); }
    static U load32(const std::uint32_t *from) { return (U)_mm512_loadu_si512(from); }
    static U load16(const std::uint16_t *from) {
        return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    }
    static U load_signed16(const std::int16_t *from) {
        return (U)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
    }
    static void store16(std::uint16_t *to, U halves) {
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)halves));
    }
    static constexpr std::uintptr_t stream_bytes = 32;
    static void stream16(std::uint16_t *to, U halves) {
        _mm256_stream_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)halves));
    }
    static void fence() { _mm_sfence(); }
    typedef std::uint64_t W __attribute__((vector_size(64)));
    static constexpr int word_lanes = 8;
    static W splat_words(std::uint32_t value) { return (W)_mm512_set1_epi64(value); }
    static W every_second(std::uint32_t first) { return splat_words(first) + W{0, 2, 4, 6, 8, 10, 12, 14}; }
    static W multiply(W a, std::uint32_t b) { return (W)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b)); }
    static void store_words(std::uint32_t *to, W even, W odd) {
        _mm512_storeu_si512(to, _mm512_mask_blend_epi32(0xAAAA, (__m512i)even, (__m512i)(odd << 32)));
    }
    struct Sums {
        __m512d sums[4];
    };
    static Sums no_sums() {
        const __m512d zero = _mm512_setzero_pd();
        return {{zero, zero, zero, zero}};
    }
    static void add_squares(Sums &to, int vector, V value) {
        const __m512i halves = _mm512_castps_si512(value);
        const __m512d first = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(halves)));
        const __m512d second = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_extracti64x4_epi64(halves, 1)));
        to.sums[2 * vector] = _mm512_fmadd_pd(first, first, to.sums[2 * vector]);
        to.sums[2 * vector + 1] = _mm512_fmadd_pd(second, second, to.sums[2 * vector + 1]);
    }
    static void store_sums(const Sums &from, double *sums) {
        for (int i = 0; i < 4; ++i) _mm512_storeu_pd(sums + 8 * i, from.sums[i]);
    }
};

}  // namespace

namespace shardopt {

constexpr Level level_avx512 = level_of<Avx512>();

}  // namespace shardopt
