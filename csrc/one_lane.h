// The policy of one lane: the reference for the others, and the tail of each.
#pragma once

#include <cstdint>

namespace {

// So many that additions to one need not wait for each other.
constexpr int num_sums = 32;

struct OneLane {
    using V = float;
    using U = std::uint32_t;
    using I = std::int32_t;
    static constexpr std::int64_t lanes = 1;
    static constexpr int batch = 1;
    static V load(const float *from) { return *from; }
    static void store(float *to, V value) { *to = value; }
    static V splat(float value) { return value; }
    static V fma(V a, V b, V c) { return __builtin_fmaf(a, b, c); }
    static V sqrt(V value) { return __builtin_sqrtf(value); }
    static U bits(V value) {
        U bits;
        __builtin_memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static V floats(U bits) {
        V value;
        __builtin_memcpy(&value, &bits, sizeof value);
        return value;
    }
    static U splat_bits(std::uint32_t bits) { return bits; }
    static U load32(const std::uint32_t *from) { return *from; }
    // Zero- and sign-extended.
    static U load16(const std::uint16_t *from) { return *from; }
    static U load_signed16(const std::int16_t *from) { return static_cast<U>(static_cast<I>(*from)); }
    // The upper halves of `halves` are zero.
    static void store16(std::uint16_t *to, U halves) { *to = static_cast<std::uint16_t>(halves); }
    // Past the caches, where the level can do that; `to` is aligned to stream_bytes.
    static constexpr std::uintptr_t stream_bytes = 2;
    static void stream16(std::uint16_t *to, U halves) { store16(to, halves); }
    // Orders what stream16 wrote before whatever follows.
    static void fence() {}
    // Lanes of 64 bits; see words_body.h.
    using W = std::uint64_t;
    static constexpr int word_lanes = 1;
    static W splat_words(std::uint32_t value) { return value; }
    // first, first + 2, first + 4, ...
    static W every_second(std::uint32_t first) { return first; }
    // Of lower halves; all 64 bits of each product.
    static W multiply(W a, std::uint32_t b) { return W{static_cast<std::uint32_t>(a)} * b; }
    // Lower halves, by turns of one and of the other.
    static void store_words(std::uint32_t *to, W even, W odd) {
        to[0] = static_cast<std::uint32_t>(even);
        to[1] = static_cast<std::uint32_t>(odd);
    }
    // Sums in double; lane i of vector n belongs to sum n * lanes + i.
    struct Sums {
        double sums[num_sums];
    };
    static Sums no_sums() { return {}; }
    static void add_squares(Sums &to, int vector, V value) {
        to.sums[vector] += static_cast<double>(value) * static_cast<double>(value);
    }
    static void store_sums(const Sums &from, double *sums) {
        for (int sum = 0; sum < num_sums; ++sum) sums[sum] = from.sums[sum];
    }
};

}  // namespace
