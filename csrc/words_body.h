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

// Counters of four words, in place; two vectors of counters at a time, for one's arithmetic to fill the other's waits.
// Words lie in lanes of 64 bits whose upper halves hold anything: the products of lower halves are what counts.
template <class P>
struct Counters {
    typename P::W a[2], b[2], c[2], d[2];

    void draw(std::uint32_t key0, std::uint32_t key1) {
        for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
            for (int part = 0; part < 2; ++part) {
                const typename P::W from_a = P::multiply(a[part], 0xD2511F53u);
                const typename P::W from_c = P::multiply(c[part], 0xCD9E8D57u);
                a[part] = (from_c >> 32) ^ b[part] ^ P::splat_words(key0);
                b[part] = from_c;
                c[part] = (from_a >> 32) ^ d[part] ^ P::splat_words(key1);
                d[part] = from_a;
            }
    }
};

struct Key {
    std::uint32_t key[2];
    std::uint32_t upper[2];

    explicit Key(const RandomStream &from) {
        Counters<OneLane> one = {{from.stream}, {from.stream >> 32}, {from.step}, {from.step >> 32}};
        one.draw(low_half(from.seed), high_half(from.seed));
        key[0] = low_half(one.a[0]);
        key[1] = low_half(one.b[0]);
        upper[0] = low_half(one.c[0]);
        upper[1] = low_half(one.d[0]);
    }
};

template <class P>
void random_group(const Key &key, std::int64_t group, std::uint32_t *words) {
    const std::uint64_t counter = static_cast<std::uint64_t>(group) * 16;
    // The lowest four bits of `counter` are zero, so what is added to its lower half never carries.
    for (std::uint32_t first = 0; first < 16; first += 2 * P::word_lanes) {
        Counters<P> draws;
        for (int part = 0; part < 2; ++part) {
            draws.a[part] = P::every_second(low_half(counter) + first + static_cast<std::uint32_t>(part));
            draws.b[part] = P::splat_words(high_half(counter));
            draws.c[part] = P::splat_words(key.upper[0]);
            draws.d[part] = P::splat_words(key.upper[1]);
        }
        draws.draw(key.key[0], key.key[1]);
        P::store_words(words + first, draws.a[0], draws.a[1]);
        P::store_words(words + first + 16, draws.b[0], draws.b[1]);
        P::store_words(words + first + 32, draws.c[0], draws.c[1]);
        P::store_words(words + first + 48, draws.d[0], draws.d[1]);
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
