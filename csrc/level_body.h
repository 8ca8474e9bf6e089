// Sums of squares and the bandwidth probe over a policy of lanes, and the level that a policy makes.
#pragma once

#include "step_body.h"
#include "words_body.h"

namespace {

// A float's square is exact in double, so only the order of additions counts: element i goes to sum i % 32, and the
// sums are added from the first to the last.
template <class P, bool bf16>
double sum_squares(const void *grad, std::int64_t numel) {
    typename P::Sums vectors = P::no_sums();
    constexpr int parts = static_cast<int>(num_sums / P::lanes);
    std::int64_t i = 0;
    for (; numel - i >= num_sums; i += num_sums)
        for (int part = 0; part < parts; ++part)
            P::add_squares(vectors, part, load<P, bf16>(grad, i + part * P::lanes));
    OneLane::Sums lanes;
    P::store_sums(vectors, lanes.sums);
    for (int lane = 0; i < numel; ++i, ++lane) OneLane::add_squares(lanes, lane, load<OneLane, bf16>(grad, i));
    double total = 0.0;
    for (double lane : lanes.sums) total += lane;
    return total;
}

template <class P>
double sum_of_squares(const void *grad, bool bf16, std::int64_t numel) {
    return bf16 ? sum_squares<P, true>(grad, numel) : sum_squares<P, false>(grad, numel);
}

template <class P, int batch>
std::int64_t probe_lanes(const Span &span, std::int64_t first) {
    const Span b = span;
    const typename P::V zero = P::splat(0.0f);  // every buffer keeps its finite values
    void *const written[3] = {b.exp_avg, b.exp_avg_sq, b.param};
    std::int64_t i = first;
    for (; b.numel - i >= batch * P::lanes; i += batch * P::lanes) {
        typename P::V grad[batch], value[batch];
        for (int k = 0; k < batch; ++k) grad[k] = load<P, false>(b.grad, i + k * P::lanes);
        for (void *buffer : written) {
            for (int k = 0; k < batch; ++k) value[k] = P::fma(grad[k], zero, load<P, false>(buffer, i + k * P::lanes));
            for (int k = 0; k < batch; ++k) store32<P>(buffer, i + k * P::lanes, value[k]);
        }
    }
    return i;
}

template <class P>
void probe(const Span &b) {
    probe_lanes<OneLane, 1>(b, probe_lanes<P, P::batch>(b, 0));
}

template <class P>
constexpr shardopt::Level level_of() {
    return {step_for<P>, random_words<P>, sum_of_squares<P>, probe<P>};
}

}  // namespace
