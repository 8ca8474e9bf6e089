// 16-lane compiler vectors, for any CPU.
//
// They run AVX-512's loops, width and tails on machines without AVX-512, so these are tested everywhere, and they are
// the default level where there is no x86 one (on Arm the compiler splits a vector into four NEON registers).
#include "level_body.h"

namespace {

struct SixteenLanes {
    typedef float V __attribute__((vector_size(64)));
    typedef std::uint32_t U __attribute__((vector_size(64)));
    typedef std::int32_t I __attribute__((vector_size(64)));
    typedef std::uint16_t Halves __attribute__((vector_size(32)));
    typedef std::int16_t SignedHalves __attribute__((vector_size(32)));
    static constexpr std::int64_t lanes = 16;
    static constexpr int batch = 2;  // two cache lines of floats

    template <class Vector, class Element>
    static Vector read(const Element *from) {
        Vector value;
        __builtin_memcpy(&value, from, sizeof value);
        return value;
    }
    static V load(const float *from) { return read<V>(from); }
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
    static U bits(V value) { return (U)value; }
    static V floats(U bits) { return (V)bits; }
    static U splat_bits(std::uint32_t bits) { return bits + U{}; }
    static U load32(const std::uint32_t *from) { return read<U>(from); }
    static U load16(const std::uint16_t *from) { return __builtin_convertvector(read<Halves>(from), U); }
    static U load_signed16(const std::int16_t *from) {
        return (U) __builtin_convertvector(read<SignedHalves>(from), I);
    }
    static void store16(std::uint16_t *to, U halves) {
        const Halves packed = __builtin_convertvector(halves, Halves);
        __builtin_memcpy(to, &packed, sizeof packed);
    }
    static constexpr std::uintptr_t stream_bytes = 2;
    static void stream16(std::uint16_t *to, U halves) { store16(to, halves); }
    static void fence() {}
    typedef std::uint64_t W __attribute__((vector_size(64)));
    static constexpr int word_lanes = 8;
    static W splat_words(std::uint32_t value) { return std::uint64_t{value} + W{}; }
    static W every_second(std::uint32_t first) { return splat_words(first) + W{0, 2, 4, 6, 8, 10, 12, 14}; }
    static W multiply(W a, std::uint32_t b) { return (a & 0xFFFFFFFFu) * std::uint64_t{b}; }
    static void store_words(std::uint32_t *to, W even, W odd) {
        const W both = (even & 0xFFFFFFFFu) | (odd << 32);
        __builtin_memcpy(to, &both, sizeof both);
    }
    using Sums = OneLane::Sums;
    static Sums no_sums() { return {}; }
    static void add_squares(Sums &to, int vector, V value) {
        for (int lane = 0; lane < 16; ++lane) OneLane::add_squares(to, 16 * vector + lane, value[lane]);
    }
    static void store_sums(const Sums &from, double *sums) { OneLane::store_sums(from, sums); }
};

}  // namespace

namespace shardopt {

constexpr Level level_lanes16 = level_of<SixteenLanes>();

}  // namespace shardopt
