// Random words for stochastic rounding: a pure function of (seed, step, stream, global index), over a policy of lanes.
//
// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, sec. 3.3), keyed by the seed,
// turns (stream, step) into a key and an upper half of the counter, which the draws for elements are made with. Sixteen
// consecutive counters give four words each, to a group of 64 consecutive elements: element e of the unsharded tensor
// has word (e / 16) % 4 of counter e / 64 * 16 + e % 16. So vectors of counters make vectors of words; nothing is
// shuffled.
#pragma once

#include "level.h"
#include "one_lane.h"

namespace {

using shardopt::IndexRuns;
using shardopt::RandomStream;

constexpr std::int64_t group_elements = 64;

std::uint32_t low_half(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
std::uint32_t high_half(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

// `parts` vectors of counters at a time, words a, b, c and d of each; in place.
template <class P, int parts>
void philox(typename P::U (&a)[parts], typename P::U (&b)[parts], typename P::U (&c)[parts], typename P::U (&d)[parts],
            std::uint32_t key0, std::uint32_t key1) {
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
        for (int part = 0; part < parts; ++part) {
            typename P::U high_a, low_a, high_c, low_c;
            P::multiply(a[part], 0xD2511F53u, high_a, low_a);
            P::multiply(c[part], 0xCD9E8D57u, high_c, low_c);
            a[part] = high_c ^ b[part] ^ P::splat_bits(key0);
            b[part] = low_c;
            c[part] = high_a ^ d[part] ^ P::splat_bits(key1);
            d[part] = low_a;
        }
}

struct Key {
    std::uint32_t key[2];
    std::uint32_t upper[2];

    explicit Key(const RandomStream &from) {
        std::uint32_t a[1] = {low_half(from.stream)}, b[1] = {high_half(from.stream)};
        std::uint32_t c[1] = {low_half(from.step)}, d[1] = {high_half(from.step)};
        philox<OneLane, 1>(a, b, c, d, low_half(from.seed), high_half(from.seed));
        key[0] = a[0];
        key[1] = b[0];
        upper[0] = c[0];
        upper[1] = d[0];
    }
};

template <class P>
void random_group(const Key &key, std::int64_t group, std::uint32_t *words) {
    constexpr int parts = static_cast<int>(16 / P::lanes);
    const std::uint64_t counter = static_cast<std::uint64_t>(group) * 16;
    typename P::U a[parts], b[parts], c[parts], d[parts];
    for (int part = 0; part < parts; ++part) {
        // The lowest four bits of `counter` are zero, so what is added never carries.
        a[part] = P::iota() + P::splat_bits(low_half(counter) + static_cast<std::uint32_t>(part * P::lanes));
        b[part] = P::splat_bits(high_half(counter));
        c[part] = P::splat_bits(key.upper[0]);
        d[part] = P::splat_bits(key.upper[1]);
    }
    philox<P, parts>(a, b, c, d, key.key[0], key.key[1]);
    for (int part = 0; part < parts; ++part) {
        std::uint32_t *const to = words + part * P::lanes;
        P::store32(to, a[part]);
        P::store32(to + 16, b[part]);
        P::store32(to + 32, c[part]);
        P::store32(to + 48, d[part]);
    }
}

template <class P>
void random_words(const RandomStream &stream, const IndexRuns &runs, std::int64_t first, std::int64_t count,
                  std::uint32_t *words) {
    const Key key(stream);
    std::uint32_t partial[group_elements];
    std::int64_t in_partial = -1;  // the group that `partial` holds; short runs take many pieces of one
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t run = (first + done) / runs.run, offset = (first + done) % runs.run;
        const std::int64_t index = runs.start + run * runs.stride + offset;
        const std::int64_t group = index / group_elements, skipped = index % group_elements;
        std::int64_t taken = group_elements - skipped;
        if (taken > runs.run - offset) taken = runs.run - offset;
        if (taken > count - done) taken = count - done;
        if (taken == group_elements) {
            random_group<P>(key, group, words + done);
        } else {
            if (group != in_partial) random_group<P>(key, group, partial);
            in_partial = group;
            for (std::int64_t i = 0; i < taken; ++i) words[done + i] = partial[skipped + i];
        }
        done += taken;
    }
}

}  // namespace
