// What is wrong with a table of rows, found before anything is written.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "rows.h"

namespace shardopt {

struct Table {
    const Row *rows;
    std::size_t size;
};

// Number of a row, and a sentence that follows its name; <n> in it stands for the name of row n.
using Problems = std::vector<std::pair<std::size_t, std::string>>;

// For a step, with that many rows of numbers.
Problems problems_of_step(const Table &table, std::int64_t num_hypers);

// For what reads gradients only.
Problems problems_of_grads(const Table &table);

// For what writes moments only.
Problems problems_of_moments(const Table &table);

}  // namespace shardopt
