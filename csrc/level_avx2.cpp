// AVX2, 8 lanes. Compiled with -mavx2 -mfma; called only where dispatch.cpp saw both.
#include <immintrin.h>

#include "level_body.h"

namespace {

struct Avx2 {
    using V = __m256;
    typedef std::uint32_t U __attribute__((vector_size(32)));
    typedef std::int32_t I __attribute__((vector_size(32)));
    static constexpr std::int64_t lanes = 8;
    static constexpr int batch = 4;  // two cache lines of floats
    static V load(const float *from) { return _mm256_loadu_ps(from); }
    static void store(float *to, V value) { _mm256_storeu_ps(to, value); }
    static V splat(float value) { return _mm256_set1_ps(value); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static V sqrt(V value) { return _mm256_sqrt_ps(value); }
    static U bits(V value) { return (U)value; }
    static V floats(U bits) { return (V)bits; }
    static U splat_bits(std::uint32_t bits) { return (U)_mm256_set1_epi32(static_cast<int>(bits)); }
    static U load32(const std::uint32_t *from) { return (U)_mm256_loadu_si256((const __m256i *)from); }
    static U load16(const std::uint16_t *from) {
        return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    }
    static U load_signed16(const std::int16_t *from) {
        return (U)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
    }
    static __m128i packed(U halves) {
        return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)halves), _mm256_extracti128_si256((__m256i)halves, 1));
    }
    static void store16(std::uint16_t *to, U halves) { _mm_storeu_si128((__m128i *)to, packed(halves)); }
    static constexpr std::uintptr_t stream_bytes = 16;
    static void stream16(std::uint16_t *to, U halves) { _mm_stream_si128((__m128i *)to, packed(halves)); }
    static void fence() { _mm_sfence(); }
    typedef std::uint64_t W __attribute__((vector_size(32)));
    static constexpr int word_lanes = 4;
    static W splat_words(std::uint32_t value) { return (W)_mm256_set1_epi64x(value); }
    static W every_second(std::uint32_t first) { return splat_words(first) + W{0, 2, 4, 6}; }
    static W multiply(W a, std::uint32_t b) { return (W)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b)); }
    static void store_words(std::uint32_t *to, W even, W odd) {
        _mm256_storeu_si256((__m256i *)to, _mm256_blend_epi32((__m256i)even, (__m256i)(odd << 32), 0xAA));
    }
    struct Sums {
        __m256d sums[8];
    };
    static Sums no_sums() {
        const __m256d zero = _mm256_setzero_pd();
        return {{zero, zero, zero, zero, zero, zero, zero, zero}};
    }
    static void add_squares(Sums &to, int vector, V value) {
        const __m256d first = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
        const __m256d second = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
        to.sums[2 * vector] = _mm256_fmadd_pd(first, first, to.sums[2 * vector]);
        to.sums[2 * vector + 1] = _mm256_fmadd_pd(second, second, to.sums[2 * vector + 1]);
    }
    static void store_sums(const Sums &from, double *sums) {
        for (int i = 0; i < 8; ++i) _mm256_storeu_pd(sums + 4 * i, from.sums[i]);
    }
};

}  // namespace

namespace shardopt {

constexpr Level level_avx2 = level_of<Avx2>();

}  // namespace shardopt
