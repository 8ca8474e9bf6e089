// AVX-512 AdamW step, 16 lanes. Compiled with -mavx512f; called only where dispatch.cpp saw it.
//
// Not yet run on AVX-512 hardware. The loop and tails are adamw_lanes16.cpp's, which is tested everywhere; what is
// untested is the policy below. On a machine that has AVX-512 the ordinary tests run this level too.
#include <immintrin.h>

#include "adamw_body.h"

namespace {

struct Avx512 {
    using V = __m512;
    static constexpr std::int64_t lanes = 16;
    static V load(const float *from) { return _mm512_loadu_ps(from); }
    static void store(float *to, V value) { _mm512_storeu_ps(to, value); }
    static V splat(float value) { return _mm512_set1_ps(value); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V sqrt(V value) { return _mm512_sqrt_ps(value); }
};

}  // namespace

namespace shardopt {

void adamw_avx512(const AdamWBuffers &buffers, const AdamWScalars &scalars) { step_all<Avx512>(buffers, scalars); }

}  // namespace shardopt
