// Work over tables of rows: cut into blocks, shared among threads. Tables must have been checked.
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "level.h"
#include "rows.h"

namespace shardopt {

// Elements first ... first + numel - 1 of a row.
struct Block {
    std::size_t row;
    std::int64_t first;
    std::int64_t numel;
};

// All elements of a table in order, and where each thread's share begins; the last entry is the number of blocks.
struct Plan {
    std::vector<Block> blocks;
    std::vector<std::size_t> shares;
};

// Depends on the numbers of elements only, so the same memory goes to the same thread each time.
Plan plan_of(const Table &table, int num_threads);

void adamw_rows(const Level &level, const Table &table, const Hyper *hypers, std::size_t num_hypers, std::uint64_t seed,
                double grad_scale, int num_threads);
void sum_of_squares(const Level &level, const Table &table, int num_threads, double *sums);
void zero_moments(const Table &table, int num_threads);
void probe_rows(const Level &level, const Table &table, int num_threads);

}  // namespace shardopt
