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
    static void store32(std::uint32_t *to, U bits) { _mm512_storeu_si512(to, (__m512i)bits); }
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
    static U iota() { return U{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
    // Even and odd lanes apart: their products are 64 bits wide.
    static void multiply(U a, std::uint32_t b, U &high, U &low) {
        const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
        const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
        const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
        high = (U)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
        low = (U)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    }
    struct Sums {
        __m512d sums[2];
    };
    static Sums no_sums() { return {{_mm512_setzero_pd(), _mm512_setzero_pd()}}; }
    static void add_squares(Sums &to, int, V value) {
        const __m512i halves = _mm512_castps_si512(value);
        const __m512d first = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(halves)));
        const __m512d second = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_extracti64x4_epi64(halves, 1)));
        to.sums[0] = _mm512_fmadd_pd(first, first, to.sums[0]);
        to.sums[1] = _mm512_fmadd_pd(second, second, to.sums[1]);
    }
    static void store_sums(const Sums &from, double *sums) {
        _mm512_storeu_pd(sums, from.sums[0]);
        _mm512_storeu_pd(sums + 8, from.sums[1]);
    }
};

}  // namespace

namespace shardopt {

constexpr Level level_avx512 = level_of<Avx512>();

}  // namespace shardopt
