// What an ISA level offers: the loops over elements, one set for each level, all with the same bits.
//
// ISA files include this header, so it must stay free of inline functions: an inline function emitted by a file
// compiled with -mavx2 could be the copy the linker keeps for everyone, and an older CPU would die on it.
#pragma once

#include <cstdint>

namespace shardopt {

enum class ParamKind { fp32, fp32_with_copy, bf16, bf16_over_fp32, bf16_with_remainder };

// What is at the addresses of a span.
struct Format {
    ParamKind param;
    bool bf16_grad;
    bool bf16_moments;
    bool amsgrad;
};

// Numbers that are the same for every element of a span.
struct Scalars {
    float decay;        // lr * weight_decay
    float grad_weight;  // 1 - beta1
    float beta2;
    float square_weight;    // 1 - beta2
    float step_size;        // lr / (1 - beta1^step)
    float bias_correction;  // sqrt(1 - beta2^step)
    float eps;
    float grad_factor;  // of every gradient: its sign and its scale
};

// Buffers of numel elements each. They need no alignment beyond their elements' and must not overlap.
struct Span {
    void *param;
    const void *grad;
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq;
    void *master;
    void *out;
    const std::uint32_t *words;  // random, one for each element; bf16 moments only
    std::int64_t numel;
};

// Where the elements of a row are in the unsharded tensor: element i at start + i / run * stride + i % run.
struct IndexRuns {
    std::int64_t start;
    std::int64_t run;
    std::int64_t stride;
};

// What random words depend on besides an element's global index.
struct RandomStream {
    std::uint64_t seed;
    std::uint64_t stream;
    std::uint64_t step;
};

using StepSpan = void (*)(const Span &, const Scalars &);

struct Level {
    StepSpan (*step_for)(const Format &);
    // One word for each of the elements first ... first + count - 1 of a row.
    void (*random_words)(const RandomStream &, const IndexRuns &, std::int64_t first, std::int64_t count,
                         std::uint32_t *words);
    double (*sum_of_squares)(const void *grad, bool bf16, std::int64_t numel);
    // Reads and writes what a step of fp32 without amsgrad does, and computes next to nothing.
    void (*probe)(const Span &);
};

// Constant-initialized, each in its file: nothing compiled for a level runs when the library is loaded.
extern const Level level_scalar;
extern const Level level_lanes16;
extern const Level level_avx2;
extern const Level level_avx512;

}  // namespace shardopt
