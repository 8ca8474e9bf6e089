// The tables that Python hands over: shardopt.swap.kernel_rows has the same fields as numpy dtypes.
#pragma once

#include <cstdint>

namespace shardopt {

enum : std::int8_t { kFp32 = 0, kBf16 = 1 };
enum : std::int8_t { kNoMaster = 0, kFp32Master = 1, kRemainder16 = 2 };

// One contiguous span of elements. Addresses point to its first element; 0 means none.
struct Row {
    std::int64_t param;
    std::int64_t grad;
    std::int64_t exp_avg;
    std::int64_t exp_avg_sq;
    std::int64_t max_exp_avg_sq;
    std::int64_t master;
    std::int64_t out;
    std::int64_t numel;
    std::int64_t index_start;
    std::int64_t index_run;
    std::int64_t index_stride;
    std::uint64_t stream;
    std::int64_t hyper;
    std::int8_t param_dtype;
    std::int8_t grad_dtype;
    std::int8_t moment_dtype;
    std::int8_t master_kind;
};

// Numbers that many rows share, in double; the kernel rounds each to float once.
struct Hyper {
    double decay;
    double grad_weight;
    double beta2;
    double square_weight;
    double step_size;
    double bias_correction;
    double eps;
    double grad_sign;
    std::int64_t step;
};

}  // namespace shardopt
