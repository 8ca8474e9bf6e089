// AVX2 AdamW step, 8 lanes. Compiled with -mavx2 -mfma; called only where dispatch.cpp saw both.
#include <immintrin.h>

#include "adamw_body.h"

namespace {

struct Avx2 {
    using V = __m256;
    static constexpr std::int64_t lanes = 8;
    static V load(const float *from) { return _mm256_loadu_ps(from); }
    static void store(float *to, V value) { _mm256_storeu_ps(to, value); }
    static V splat(float value) { return _mm256_set1_ps(value); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static V sqrt(V value) { return _mm256_sqrt_ps(value); }
};

}  // namespace

namespace shardopt {

void adamw_avx2(const AdamWBuffers &buffers, const AdamWScalars &scalars) { step_all<Avx2>(buffers, scalars); }

}  // namespace shardopt
