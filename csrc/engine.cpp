#include "engine.h"

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <system_error>
#include <thread>

namespace shardopt {
namespace {

// A block's buffers stay in the second-level cache of the thread that works on it, and there are enough to share out.
constexpr std::int64_t kBlockElements = 32 * 1024;
// Random words are made for as many elements at a time; they stay in the first-level cache.
constexpr std::int64_t kTileElements = 1024;
// A step of this many elements takes about as long as a thread needs to start, 20 to 30 us.
constexpr std::int64_t kLeastPerThread = 32 * 1024;

void *at(std::int64_t address, std::int64_t bytes) {
    return address == 0 ? nullptr : reinterpret_cast<void *>(address + bytes);
}

std::int64_t width(std::int8_t dtype) { return dtype == kBf16 ? 2 : 4; }

Format format_of(const Row &row) {
    const bool wide = row.param_dtype == kFp32;
    ParamKind param = wide ? ParamKind::fp32 : ParamKind::bf16;
    if (wide && row.out != 0) param = ParamKind::fp32_with_copy;
    if (row.master_kind == kFp32Master) param = ParamKind::bf16_over_fp32;
    if (row.master_kind == kRemainder16) param = ParamKind::bf16_with_remainder;
    return {param, row.grad_dtype == kBf16, row.moment_dtype == kBf16, row.max_exp_avg_sq != 0};
}

Span span_of(const Row &row, std::int64_t first, std::int64_t numel, const std::uint32_t *words) {
    const std::int64_t moment = first * width(row.moment_dtype);
    return {at(row.param, first * width(row.param_dtype)),
            at(row.grad, first * width(row.grad_dtype)),
            at(row.exp_avg, moment),
            at(row.exp_avg_sq, moment),
            at(row.max_exp_avg_sq, moment),
            at(row.master, first * (row.master_kind == kRemainder16 ? 2 : 4)),
            at(row.out, first * 2),
            words,
            numel};
}

Scalars scalars_of(const Hyper &hyper, double grad_scale) {
    return {static_cast<float>(hyper.decay),     static_cast<float>(hyper.grad_weight),
            static_cast<float>(hyper.beta2),     static_cast<float>(hyper.square_weight),
            static_cast<float>(hyper.step_size), static_cast<float>(hyper.bias_correction),
            static_cast<float>(hyper.eps),       static_cast<float>(hyper.grad_sign * grad_scale)};
}

enum class Order { forward, backward };

// The default floating-point environment for as long as it lives. A thread inherits its creator's, in which
// torch.set_flush_denormal may have turned subnormal numbers off; that would change bits.
class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats &) = delete;
    DefaultFloats &operator=(const DefaultFloats &) = delete;

  private:
    std::fenv_t before_;
};

template <class Work>
void run_share(const Plan &plan, std::size_t share, Order order, const Work &work) {
    const DefaultFloats floats;
    const std::size_t first = plan.shares[share], end = plan.shares[share + 1];
    for (std::size_t block = first; block < end; ++block)
        work(order == Order::forward ? block : first + end - 1 - block);
}

// Calls work(number of block) for all blocks, each share on a thread of its own, the first on this one.
//
// Threads live for one call: to start one took 20 us where it was measured, and to wake one that waits 5 us, which is
// not worth what a pool needs to survive forks and the interpreter's end.
template <class Work>
void run(const Plan &plan, Order order, const Work &work) {
    const std::size_t num_shares = plan.shares.size() - 1;
    std::vector<std::thread> threads;
    threads.reserve(num_shares);
    std::size_t share = 1;
    try {
        for (; share < num_shares; ++share)
            threads.emplace_back([&plan, &work, order, share] { run_share(plan, share, order, work); });
    } catch (const std::system_error &) {
        // The system gives no more threads; half a step is not to be left behind, so this one does the rest.
    }
    run_share(plan, 0, order, work);
    for (; share < num_shares; ++share) run_share(plan, share, order, work);
    for (std::thread &thread : threads) thread.join();
}

}  // namespace

Plan plan_of(const Table &table, int num_threads) {
    Plan plan;
    std::int64_t total = 0;
    for (std::size_t row = 0; row < table.size; ++row) {
        const std::int64_t numel = table.rows[row].numel;
        for (std::int64_t first = 0; first < numel; first += kBlockElements)
            plan.blocks.push_back({row, first, std::min(kBlockElements, numel - first)});
        total += numel;
    }
    const std::int64_t useful = std::max<std::int64_t>(1, total / kLeastPerThread);
    const std::int64_t num_shares = std::min<std::int64_t>(num_threads, useful);
    plan.shares.push_back(0);
    std::int64_t before = 0;  // elements of the blocks that have been shared out
    for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
        // A block goes to the share in which its middle falls.
        const double middle = static_cast<double>(before) + 0.5 * static_cast<double>(plan.blocks[block].numel);
        const double share = middle / static_cast<double>(total) * static_cast<double>(num_shares);
        while (static_cast<double>(plan.shares.size()) <= share) plan.shares.push_back(block);
        before += plan.blocks[block].numel;
    }
    plan.shares.push_back(plan.blocks.size());
    return plan;
}

void adamw_rows(const Level &level, const Table &table, const Hyper *hypers, std::size_t num_hypers, std::uint64_t seed,
                double grad_scale, int num_threads) {
    std::vector<Scalars> scalars;
    scalars.reserve(num_hypers);
    for (std::size_t hyper = 0; hyper < num_hypers; ++hyper) scalars.push_back(scalars_of(hypers[hyper], grad_scale));
    const Plan plan = plan_of(table, num_threads);
    run(plan, Order::forward, [&](std::size_t number) {
        const Block &block = plan.blocks[number];
        const Row &row = table.rows[block.row];
        const StepSpan step = level.step_for(format_of(row));
        if (row.moment_dtype != kBf16) {
            step(span_of(row, block.first, block.numel, nullptr), scalars[row.hyper]);
            return;
        }
        const RandomStream stream{seed, row.stream, static_cast<std::uint64_t>(hypers[row.hyper].step)};
        const IndexRuns runs{row.index_start, row.index_run, row.index_stride};
        std::uint32_t words[kTileElements];
        for (std::int64_t done = 0; done < block.numel; done += kTileElements) {
            const std::int64_t first = block.first + done, numel = std::min(kTileElements, block.numel - done);
            level.random_words(stream, runs, first, numel, words);
            step(span_of(row, first, numel, words), scalars[row.hyper]);
        }
    });
}

void sum_of_squares(const Level &level, const Table &table, int num_threads, double *sums) {
    const Plan plan = plan_of(table, num_threads);
    std::vector<double> parts(plan.blocks.size());
    // A step begins where this ends, and finds there what the caches still hold.
    run(plan, Order::backward, [&](std::size_t number) {
        const Block &block = plan.blocks[number];
        const Row &row = table.rows[block.row];
        parts[number] = level.sum_of_squares(at(row.grad, block.first * width(row.grad_dtype)), row.grad_dtype == kBf16,
                                             block.numel);
    });
    std::fill(sums, sums + table.size, 0.0);
    for (std::size_t number = 0; number < parts.size(); ++number) sums[plan.blocks[number].row] += parts[number];
}

void zero_moments(const Table &table, int num_threads) {
    const Plan plan = plan_of(table, num_threads);
    run(plan, Order::forward, [&](std::size_t number) {
        const Block &block = plan.blocks[number];
        const Row &row = table.rows[block.row];
        const std::int64_t bytes = width(row.moment_dtype);
        for (std::int64_t address : {row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq})
            if (address != 0)
                std::memset(at(address, block.first * bytes), 0, static_cast<std::size_t>(block.numel * bytes));
    });
}

void probe_rows(const Level &level, const Table &table, int num_threads) {
    const Plan plan = plan_of(table, num_threads);
    run(plan, Order::forward, [&](std::size_t number) {
        const Block &block = plan.blocks[number];
        level.probe(span_of(table.rows[block.row], block.first, block.numel, nullptr));
    });
}

}  // namespace shardopt
