// One AdamW step over flat float32 buffers: the contract every ISA level implements bit for bit.
//
// ISA files include this header, so it must stay free of inline functions: an inline function emitted by a file
// compiled with -mavx2 could be the copy the linker keeps for everyone, and an older CPU would die on it.
#pragma once

#include <cstdint>

namespace shardopt {

// Numbers that are the same for every element. They are computed in double by the caller and rounded once.
struct AdamWScalars {
    float param_scale;  // 1 - lr * weight_decay
    float grad_weight;  // 1 - beta1
    float beta2;
    float square_weight;    // 1 - beta2
    float step_size;        // lr / (1 - beta1^step)
    float bias_correction;  // sqrt(1 - beta2^step)
    float eps;
};

// Buffers hold numel elements each, need no alignment beyond float's, and must not overlap.
struct AdamWBuffers {
    float *param;
    const float *grad;
    float *exp_avg;
    float *exp_avg_sq;
    std::int64_t numel;
};

using AdamWStep = void (*)(const AdamWBuffers &, const AdamWScalars &);

void adamw_scalar(const AdamWBuffers &, const AdamWScalars &);
void adamw_lanes16(const AdamWBuffers &, const AdamWScalars &);
void adamw_avx2(const AdamWBuffers &, const AdamWScalars &);
void adamw_avx512(const AdamWBuffers &, const AdamWScalars &);

}  // namespace shardopt
