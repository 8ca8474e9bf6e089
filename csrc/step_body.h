// The AdamW arithmetic, written once over a policy of lanes; each ISA file instantiates it with its own policy.
//
// A policy gives: V, U, I (vectors of float, uint32 and int32 with operators), lanes, and the functions of one_lane.h.
// All of these are exact or correctly rounded (IEEE), every fused multiply-add is spelled out and -ffp-contract=off
// forbids others, so every policy and every tail gives the same bits.
//
// The moments follow the order of operations of torch.optim.AdamW on CPU tensors (lerp and addcmul contract to one fma
// there), which makes them equal to torch's for-loop bit for bit. The parameter takes weight decay and update together,
// as one small change: p - (decay * p + update). Torch's p * (1 - decay) rounds twice where this rounds once, and its
// factor is off by up to half a unit in the last place of 1, which is not small beside a decay of 1e-5.
#pragma once

#include <cfloat>

#include "level.h"
#include "one_lane.h"

static_assert(FLT_EVAL_METHOD == 0, "float must be evaluated as float: build for SSE2 or later, not x87");

// Unnamed namespace, not inline: each including file must keep its own copy, compiled with its own ISA flags.
namespace {

using shardopt::ParamKind;
using shardopt::Scalars;
using shardopt::Span;

template <ParamKind param_, bool bf16_grad_, bool bf16_moments_, bool amsgrad_>
struct Formatted {
    static constexpr ParamKind param = param_;
    static constexpr bool bf16_grad = bf16_grad_;
    static constexpr bool bf16_moments = bf16_moments_;
    static constexpr bool amsgrad = amsgrad_;
};

template <class P>
struct Splats {
    typename P::V decay, coefficient, beta2, square_weight, step_size, bias_correction, eps, grad_factor;
    bool from_grad;

    explicit Splats(const Scalars &s)
        : decay(P::splat(s.decay)),
          // torch.lerp walks from the nearer end: from exp_avg for weights below a half, else back from grad.
          coefficient(P::splat(s.grad_weight < 0.5f ? s.grad_weight : s.grad_weight - 1.0f)),
          beta2(P::splat(s.beta2)),
          square_weight(P::splat(s.square_weight)),
          step_size(P::splat(s.step_size)),
          bias_correction(P::splat(s.bias_correction)),
          eps(P::splat(s.eps)),
          grad_factor(P::splat(s.grad_factor)),
          from_grad(!(s.grad_weight < 0.5f)) {}
};

// `rounded`, the upper halves of `bits` after rounding, but NaN where `bits` are: rounding may carry out of a NaN.
template <class P>
typename P::U keep_nan(typename P::U bits, typename P::U rounded) {
    const auto nan = (typename P::I)(bits & 0x7FFFFFFFu) > 0x7F800000;
    return nan ? (bits >> 16) | 0x40u : rounded;
}

template <class P>
typename P::U to_nearest(typename P::V value) {
    const typename P::U bits = P::bits(value);
    return keep_nan<P>(bits, (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Up with the probability that keeps the mean; exact values stay. `random` is uniform in 0 ... 65535.
template <class P>
typename P::U stochastic(typename P::V value, typename P::U random) {
    const typename P::U bits = P::bits(value);
    return keep_nan<P>(bits, (bits + random) >> 16);
}

template <class P, bool bf16>
typename P::V load(const void *from, std::int64_t i) {
    if constexpr (bf16)
        return P::floats(P::load16(static_cast<const std::uint16_t *>(from) + i) << 16);
    else
        return P::load(static_cast<const float *>(from) + i);
}

template <class P>
void store16(void *to, std::int64_t i, typename P::U halves) {
    P::store16(static_cast<std::uint16_t *>(to) + i, halves);
}

template <class P>
void store32(void *to, std::int64_t i, typename P::V value) {
    P::store(static_cast<float *>(to) + i, value);
}

template <class P, class F>
typename P::V load_param(const Span &b, std::int64_t i) {
    if constexpr (F::param == ParamKind::bf16_over_fp32) return load<P, false>(b.master, i);
    if constexpr (F::param == ParamKind::bf16_with_remainder)
        return P::floats((P::load16(static_cast<const std::uint16_t *>(b.param) + i) << 16) +
                         P::load_signed16(static_cast<const std::int16_t *>(b.master) + i));
    return load<P, F::param == ParamKind::bf16>(b.param, i);
}

template <class P, class F>
void store_param(const Span &b, std::int64_t i, typename P::V value) {
    if constexpr (F::param == ParamKind::bf16_with_remainder) {
        // The upper half, ties away from zero, so that what is missing fits 16 bits; as those are the lower half's
        // own, it restores the value exactly. Of NaNs one that stays NaN when it is rounded.
        const typename P::U all = P::bits(value);
        const auto nan = (typename P::I)(all & 0x7FFFFFFFu) > 0x7F800000;
        const typename P::U bits = nan ? P::splat_bits(0x7FC00000u) : all;
        store16<P>(b.param, i, (bits + 0x8000u) >> 16);
        store16<P>(b.master, i, bits & 0xFFFFu);
    } else if constexpr (F::param == ParamKind::fp32 || F::param == ParamKind::fp32_with_copy) {
        store32<P>(b.param, i, value);
        if constexpr (F::param == ParamKind::fp32_with_copy)
            P::stream16(static_cast<std::uint16_t *>(b.out) + i, to_nearest<P>(value));
    } else {
        if constexpr (F::param == ParamKind::bf16_over_fp32) store32<P>(b.master, i, value);
        store16<P>(b.param, i, to_nearest<P>(value));
    }
}

// `random_bit`: where the random half of an element's word begins.
template <class P, class F, int random_bit>
void store_moment(const Span &b, void *to, std::int64_t i, typename P::V value) {
    if constexpr (F::bf16_moments)
        store16<P>(to, i, stochastic<P>(value, (P::load32(b.words + i) >> random_bit) & 0xFFFFu));
    else
        store32<P>(to, i, value);
}

// The larger of the two, stored and returned; NaN if one of them is.
template <class P, class F>
typename P::V raise_max(const Span &b, std::int64_t i, typename P::V exp_avg_sq) {
    const typename P::V old = load<P, F::bf16_moments>(b.max_exp_avg_sq, i);
    const typename P::V largest = ((exp_avg_sq > old) | (exp_avg_sq != exp_avg_sq)) ? exp_avg_sq : old;
    // To nearest: a maximum of values that chance has raised would drift up.
    if constexpr (F::bf16_moments)
        store16<P>(b.max_exp_avg_sq, i, to_nearest<P>(largest));
    else
        store32<P>(b.max_exp_avg_sq, i, largest);
    return largest;
}

// Steps whole batches of vectors from element `first` on, up to `last`, and returns the first element it did not reach.
//
// Buffer by buffer for a batch: where addresses in all buffers fall on the same lines of the first-level cache (equally
// large allocations do), going from one buffer to the next for each vector costs up to twice the time.
// Prefetching by hand, 128 to 1,024 elements ahead, gained nothing where it was measured.
template <class P, class F, int batch>
std::int64_t step_lanes(const Span &span, const Scalars &scalars, std::int64_t first, std::int64_t last) {
    using V = typename P::V;
    const Span b = span;  // a copy that no store can change, so that its pointers stay in registers
    const Splats<P> s(scalars);
    std::int64_t i = first;
    for (; last - i >= batch * P::lanes; i += batch * P::lanes) {
        V grad[batch], exp_avg[batch], exp_avg_sq[batch];
        for (int k = 0; k < batch; ++k) grad[k] = load<P, F::bf16_grad>(b.grad, i + k * P::lanes) * s.grad_factor;
        for (int k = 0; k < batch; ++k) {
            const V old = load<P, F::bf16_moments>(b.exp_avg, i + k * P::lanes);
            exp_avg[k] = P::fma(s.coefficient, grad[k] - old, s.from_grad ? grad[k] : old);
        }
        for (int k = 0; k < batch; ++k) store_moment<P, F, 0>(b, b.exp_avg, i + k * P::lanes, exp_avg[k]);
        for (int k = 0; k < batch; ++k) {
            const V kept = load<P, F::bf16_moments>(b.exp_avg_sq, i + k * P::lanes) * s.beta2;
            exp_avg_sq[k] = P::fma(s.square_weight * grad[k], grad[k], kept);
        }
        for (int k = 0; k < batch; ++k) store_moment<P, F, 16>(b, b.exp_avg_sq, i + k * P::lanes, exp_avg_sq[k]);
        if constexpr (F::amsgrad)
            for (int k = 0; k < batch; ++k) exp_avg_sq[k] = raise_max<P, F>(b, i + k * P::lanes, exp_avg_sq[k]);
        V param[batch];
        for (int k = 0; k < batch; ++k) {
            const V old = load_param<P, F>(b, i + k * P::lanes);
            const V update = (s.step_size * exp_avg[k]) / (P::sqrt(exp_avg_sq[k]) / s.bias_correction + s.eps);
            // An infinite parameter stays what it is, as in torch: its decay would make it NaN.
            param[k] = old - P::fma(s.decay, old - old == V{} ? old : V{}, update);
        }
        for (int k = 0; k < batch; ++k) store_param<P, F>(b, i + k * P::lanes, param[k]);
    }
    return i;
}

// Elements before the first that can be written past the caches.
template <class P>
std::int64_t unaligned_elements(const void *out, std::int64_t numel) {
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(out) % P::stream_bytes;
    const std::int64_t elements = past == 0 ? 0 : static_cast<std::int64_t>((P::stream_bytes - past) / 2);
    return elements < numel ? elements : numel;
}

template <class P, class F>
void step_all(const Span &b, const Scalars &scalars) {
    std::int64_t i = 0;
    if constexpr (F::param == ParamKind::fp32_with_copy)
        i = step_lanes<OneLane, F, 1>(b, scalars, 0, unaligned_elements<P>(b.out, b.numel));
    i = step_lanes<P, F, P::batch>(b, scalars, i, b.numel);
    i = step_lanes<P, F, 1>(b, scalars, i, b.numel);
    step_lanes<OneLane, F, 1>(b, scalars, i, b.numel);
    if constexpr (F::param == ParamKind::fp32_with_copy) P::fence();
}

template <class P, ParamKind param, bool bf16_grad>
shardopt::StepSpan step_for_moments(const shardopt::Format &f) {
    if (f.bf16_moments)
        return f.amsgrad ? step_all<P, Formatted<param, bf16_grad, true, true>>
                         : step_all<P, Formatted<param, bf16_grad, true, false>>;
    return f.amsgrad ? step_all<P, Formatted<param, bf16_grad, false, true>>
                     : step_all<P, Formatted<param, bf16_grad, false, false>>;
}

template <class P, ParamKind param>
shardopt::StepSpan step_for_grad(const shardopt::Format &f) {
    return f.bf16_grad ? step_for_moments<P, param, true>(f) : step_for_moments<P, param, false>(f);
}

template <class P>
shardopt::StepSpan step_for(const shardopt::Format &f) {
    switch (f.param) {
        case ParamKind::fp32:
            return step_for_grad<P, ParamKind::fp32>(f);
        case ParamKind::fp32_with_copy:
            return step_for_grad<P, ParamKind::fp32_with_copy>(f);
        case ParamKind::bf16:
            return step_for_grad<P, ParamKind::bf16>(f);
        case ParamKind::bf16_over_fp32:
            return step_for_grad<P, ParamKind::bf16_over_fp32>(f);
        case ParamKind::bf16_with_remainder:
            return step_for_grad<P, ParamKind::bf16_with_remainder>(f);
    }
    return nullptr;
}

}  // namespace
