// The AdamW arithmetic, written once over a policy of lanes; each ISA file instantiates it with its own policy.
//
// A policy gives: V (a vector type with + - * /), lanes, load, store, splat, fma, sqrt. All of these are correctly
// rounded (IEEE), every fused multiply-add is spelled out and -ffp-contract=off forbids others, so every policy and
// every tail gives the same bits.
//
// The order of operations is torch.optim.AdamW's on CPU tensors (lerp and addcmul contract to one fma there), which
// makes the moments equal to torch's for-loop bit for bit; the parameter differs where torch's vector sqrt is not
// correctly rounded.
#pragma once

#include <cfloat>

#include "adamw.h"

static_assert(FLT_EVAL_METHOD == 0, "float must be evaluated as float: build for SSE2 or later, not x87");

// Unnamed namespace, not inline: each including file must keep its own copy, compiled with its own ISA flags.
namespace {

struct OneLane {
    using V = float;
    static constexpr std::int64_t lanes = 1;
    static V load(const float *from) { return *from; }
    static void store(float *to, V value) { *to = value; }
    static V splat(float value) { return value; }
    static V fma(V a, V b, V c) { return __builtin_fmaf(a, b, c); }
    static V sqrt(V value) { return __builtin_sqrtf(value); }
};

template <class P>
struct Splats {
    typename P::V param_scale, coefficient, beta2, square_weight, minus_step_size, bias_correction, eps;
    bool from_grad;

    explicit Splats(const shardopt::AdamWScalars &s)
        : param_scale(P::splat(s.param_scale)),
          // torch.lerp walks from the nearer end: from exp_avg for weights below a half, else back from grad.
          coefficient(P::splat(s.grad_weight < 0.5f ? s.grad_weight : s.grad_weight - 1.0f)),
          beta2(P::splat(s.beta2)),
          square_weight(P::splat(s.square_weight)),
          minus_step_size(P::splat(-s.step_size)),
          bias_correction(P::splat(s.bias_correction)),
          eps(P::splat(s.eps)),
          from_grad(!(s.grad_weight < 0.5f)) {}
};

// Steps whole vectors from element `first` on and returns the first element it did not reach.
template <class P>
std::int64_t step_lanes(const shardopt::AdamWBuffers &b, const shardopt::AdamWScalars &scalars, std::int64_t first) {
    using V = typename P::V;
    const Splats<P> s(scalars);
    std::int64_t i = first;
    for (; b.numel - i >= P::lanes; i += P::lanes) {
        const V grad = P::load(b.grad + i);
        const V old_avg = P::load(b.exp_avg + i);
        const V exp_avg = P::fma(s.coefficient, grad - old_avg, s.from_grad ? grad : old_avg);
        const V exp_avg_sq = P::fma(s.square_weight * grad, grad, P::load(b.exp_avg_sq + i) * s.beta2);
        const V denominator = P::sqrt(exp_avg_sq) / s.bias_correction + s.eps;
        const V param = P::load(b.param + i) * s.param_scale + (s.minus_step_size * exp_avg) / denominator;
        P::store(b.exp_avg + i, exp_avg);
        P::store(b.exp_avg_sq + i, exp_avg_sq);
        P::store(b.param + i, param);
    }
    return i;
}

template <class P>
void step_all(const shardopt::AdamWBuffers &b, const shardopt::AdamWScalars &scalars) {
    step_lanes<OneLane>(b, scalars, step_lanes<P>(b, scalars, 0));
}

}  // namespace
