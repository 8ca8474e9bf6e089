// AdamW step in 16-lane compiler vectors, for any CPU.
//
// It runs AVX-512's loop, width and tails on machines without AVX-512, so they are tested everywhere, and it is the
// default level where there is no x86 one (on Arm the compiler splits a vector into four NEON registers).
#include "adamw_body.h"

namespace {

struct SixteenLanes {
    typedef float V __attribute__((vector_size(64)));
    static constexpr std::int64_t lanes = 16;
    static V load(const float *from) {
        V value;
        __builtin_memcpy(&value, from, sizeof value);
        return value;
    }
    static void store(float *to, V value) { __builtin_memcpy(to, &value, sizeof value); }
    static V splat(float value) { return value - V{}; }
    static V fma(V a, V b, V c) {
        V result;
        for (int lane = 0; lane < 16; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
        return result;
    }
    static V sqrt(V value) {
        for (int lane = 0; lane < 16; ++lane) value[lane] = __builtin_sqrtf(value[lane]);
        return value;
    }
};

}  // namespace

namespace shardopt {

void adamw_lanes16(const AdamWBuffers &buffers, const AdamWScalars &scalars) {
    step_all<SixteenLanes>(buffers, scalars);
}

}  // namespace shardopt
