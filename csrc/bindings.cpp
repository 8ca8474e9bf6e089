// The Python module shardopt._host: takes tables as bytes, checks them, releases the GIL, runs the level asked for.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "engine.h"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Shares = std::vector<std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t>>>;
using Fields = std::vector<std::tuple<std::string, std::size_t, std::size_t>>;

template <class T>
const T *table_of(const Bytes &bytes, const char *name, std::size_t &size) {
    if (bytes.size() % sizeof(T) != 0)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) +
                                    " bytes, no multiple of a row's " + std::to_string(sizeof(T)));
    size = bytes.size() / sizeof(T);
    return reinterpret_cast<const T *>(bytes.data());
}

shardopt::Table rows_of(const Bytes &bytes) {
    shardopt::Table table{};
    table.rows = table_of<shardopt::Row>(bytes, "rows", table.size);
    return table;
}

shardopt::Problems adamw_rows(const Bytes &rows, const Bytes &hypers, std::uint64_t seed, double grad_scale,
                              int num_threads, const std::string &isa) {
    const shardopt::Level &level = shardopt::level_named(isa);
    const shardopt::Table table = rows_of(rows);
    std::size_t num_hypers = 0;
    const auto *const numbers = table_of<shardopt::Hyper>(hypers, "hypers", num_hypers);
    nb::gil_scoped_release released;
    shardopt::Problems problems = shardopt::problems_of_step(table, static_cast<std::int64_t>(num_hypers));
    if (problems.empty()) shardopt::adamw_rows(level, table, numbers, num_hypers, seed, grad_scale, num_threads);
    return problems;
}

shardopt::Problems sum_of_squares(const Bytes &rows, const Doubles &sums, int num_threads, const std::string &isa) {
    const shardopt::Level &level = shardopt::level_named(isa);
    const shardopt::Table table = rows_of(rows);
    if (sums.size() != table.size) throw std::invalid_argument("sums must be as long as rows");
    nb::gil_scoped_release released;
    shardopt::Problems problems = shardopt::problems_of_grads(table);
    if (problems.empty()) shardopt::sum_of_squares(level, table, num_threads, sums.data());
    return problems;
}

shardopt::Problems zero_moments(const Bytes &rows, int num_threads) {
    const shardopt::Table table = rows_of(rows);
    nb::gil_scoped_release released;
    shardopt::Problems problems = shardopt::problems_of_moments(table);
    if (problems.empty()) shardopt::zero_moments(table, num_threads);
    return problems;
}

shardopt::Problems probe_rows(const Bytes &rows, int num_threads, const std::string &isa) {
    const shardopt::Level &level = shardopt::level_named(isa);
    const shardopt::Table table = rows_of(rows);
    nb::gil_scoped_release released;
    shardopt::Problems problems = shardopt::problems_of_step(table, 1);
    if (problems.empty()) shardopt::probe_rows(level, table, num_threads);
    return problems;
}

// What each thread gets: (row, first element, number of elements) of each block.
Shares shares(const Bytes &rows, int num_threads) {
    const shardopt::Plan plan = shardopt::plan_of(rows_of(rows), num_threads);
    Shares shares(plan.shares.size() - 1);
    for (std::size_t share = 0; share < shares.size(); ++share)
        for (std::size_t number = plan.shares[share]; number < plan.shares[share + 1]; ++number) {
            const shardopt::Block &block = plan.blocks[number];
            shares[share].emplace_back(block.row, block.first, block.numel);
        }
    return shares;
}

#define SHARDOPT_FIELD(type, name) {#name, offsetof(shardopt::type, name), sizeof(shardopt::type::name)}

// (name, offset, bytes) of each field.
Fields row_fields() {
    return {SHARDOPT_FIELD(Row, param),        SHARDOPT_FIELD(Row, grad),           SHARDOPT_FIELD(Row, exp_avg),
            SHARDOPT_FIELD(Row, exp_avg_sq),   SHARDOPT_FIELD(Row, max_exp_avg_sq), SHARDOPT_FIELD(Row, master),
            SHARDOPT_FIELD(Row, out),          SHARDOPT_FIELD(Row, numel),          SHARDOPT_FIELD(Row, index_start),
            SHARDOPT_FIELD(Row, index_run),    SHARDOPT_FIELD(Row, index_stride),   SHARDOPT_FIELD(Row, stream),
            SHARDOPT_FIELD(Row, hyper),        SHARDOPT_FIELD(Row, param_dtype),    SHARDOPT_FIELD(Row, grad_dtype),
            SHARDOPT_FIELD(Row, moment_dtype), SHARDOPT_FIELD(Row, master_kind)};
}

Fields hyper_fields() {
    return {SHARDOPT_FIELD(Hyper, decay),     SHARDOPT_FIELD(Hyper, grad_weight),
            SHARDOPT_FIELD(Hyper, beta2),     SHARDOPT_FIELD(Hyper, square_weight),
            SHARDOPT_FIELD(Hyper, step_size), SHARDOPT_FIELD(Hyper, bias_correction),
            SHARDOPT_FIELD(Hyper, eps),       SHARDOPT_FIELD(Hyper, grad_sign),
            SHARDOPT_FIELD(Hyper, step)};
}

}  // namespace

NB_MODULE(_host, module) {
    module.doc() = "Host kernels of shardopt; use shardopt.swap.host_kernel, which checks and documents them.";
    module.def("available_isas", &shardopt::available_isas);
    module.def("row_fields", &row_fields);
    module.def("hyper_fields", &hyper_fields);
    module.def("shares", &shares, nb::arg("rows").noconvert(), nb::arg("num_threads"));
    module.def("adamw_rows", &adamw_rows, nb::arg("rows").noconvert(), nb::arg("hypers").noconvert(), nb::arg("seed"),
               nb::arg("grad_scale"), nb::arg("num_threads"), nb::arg("isa"));
    module.def("sum_of_squares", &sum_of_squares, nb::arg("rows").noconvert(), nb::arg("sums").noconvert(),
               nb::arg("num_threads"), nb::arg("isa"));
    module.def("zero_moments", &zero_moments, nb::arg("rows").noconvert(), nb::arg("num_threads"));
    module.def("probe_rows", &probe_rows, nb::arg("rows").noconvert(), nb::arg("num_threads"), nb::arg("isa"));
}
