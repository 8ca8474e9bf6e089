#include "check.h"

#include <algorithm>
#include <limits>

namespace shardopt {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Memory that a row reads or writes.
struct Extent {
    std::int64_t begin;
    std::int64_t end;
    std::size_t row;
    const char *name;
    bool written;
};

struct Findings {
    Problems problems;
    std::vector<Extent> extents;

    void add(std::size_t row, std::string text) { problems.emplace_back(row, std::move(text)); }

    void require_code(std::size_t row, const char *name, std::int8_t code, std::int8_t most) {
        if (code < 0 || code > most)
            add(row, std::string(name) + " is " + std::to_string(code) + "; it must be 0 to " + std::to_string(most));
    }

    void require_memory(std::size_t row, const char *name, std::int64_t address, std::int64_t numel, int element_bytes,
                        bool written) {
        if (address <= 0) {
            add(row, std::string(name) + " has address " + std::to_string(address) + "; it must point to memory");
        } else if (address % element_bytes != 0) {
            add(row, std::string(name) + " at address " + std::to_string(address) +
                         " is not aligned to its elements of " + std::to_string(element_bytes) + " bytes");
        } else if (numel > (kMost - address) / element_bytes) {
            add(row, std::string(name) + " has " + std::to_string(numel) + " elements, more than there are addresses");
        } else {
            extents.push_back({address, address + numel * element_bytes, row, name, written});
        }
    }

    // One sweep over extents in order of addresses: it is enough to remember which reaches furthest.
    void require_disjoint() {
        std::sort(extents.begin(), extents.end(), [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
        const Extent *any = nullptr, *written = nullptr;
        for (const Extent &extent : extents) {
            const Extent *const before = extent.written ? any : written;
            if (before != nullptr && before->end > extent.begin)
                add(extent.row, std::string(extent.name) + " and " + before->name +
                                    (before->row == extent.row ? "" : " of <" + std::to_string(before->row) + ">") +
                                    " share memory; each needs its own");
            if (any == nullptr || extent.end > any->end) any = &extent;
            if (extent.written && (written == nullptr || extent.end > written->end)) written = &extent;
        }
    }
};

int bytes_of(std::int8_t dtype) { return dtype == kBf16 ? 2 : 4; }

bool counts(Findings &found, std::size_t place, const Row &row) {
    if (row.numel < 0) found.add(place, "numel is " + std::to_string(row.numel) + "; it must be at least 0");
    return row.numel > 0;
}

void check_grad(Findings &found, std::size_t place, const Row &row) {
    found.require_code(place, "grad_dtype", row.grad_dtype, kBf16);
    found.require_memory(place, "grad", row.grad, row.numel, bytes_of(row.grad_dtype), false);
}

void check_moments(Findings &found, std::size_t place, const Row &row) {
    found.require_code(place, "moment_dtype", row.moment_dtype, kBf16);
    const int bytes = bytes_of(row.moment_dtype);
    found.require_memory(place, "exp_avg", row.exp_avg, row.numel, bytes, true);
    found.require_memory(place, "exp_avg_sq", row.exp_avg_sq, row.numel, bytes, true);
    if (row.max_exp_avg_sq != 0)
        found.require_memory(place, "max_exp_avg_sq", row.max_exp_avg_sq, row.numel, bytes, true);
}

void check_param(Findings &found, std::size_t place, const Row &row) {
    found.require_code(place, "param_dtype", row.param_dtype, kBf16);
    found.require_code(place, "master_kind", row.master_kind, kRemainder16);
    found.require_memory(place, "param", row.param, row.numel, bytes_of(row.param_dtype), true);
    if (row.master_kind == kNoMaster) {
        if (row.master != 0) found.add(place, "has a master, but its master_kind is none");
    } else {
        if (row.param_dtype != kBf16) found.add(place, "has a master, but its param is not bf16");
        found.require_memory(place, "master", row.master, row.numel, row.master_kind == kRemainder16 ? 2 : 4, true);
    }
    if (row.out != 0) {
        if (row.param_dtype != kFp32) found.add(place, "has an out, but its param is not fp32");
        found.require_memory(place, "out", row.out, row.numel, 2, true);
    }
}

// Random bits depend on global indices, so these must exist: 0 to the largest 64-bit integer.
void check_index(Findings &found, std::size_t place, const Row &row) {
    if (row.moment_dtype != kBf16) return;
    if (row.index_start < 0 || row.index_run < 1 || row.index_stride < 0) {
        found.add(place, "has index_start " + std::to_string(row.index_start) + ", index_run " +
                             std::to_string(row.index_run) + " and index_stride " + std::to_string(row.index_stride) +
                             "; they must be at least 0, 1 and 0");
        return;
    }
    const std::int64_t last_run = (row.numel - 1) / row.index_run;
    const std::int64_t in_run = std::min(row.index_run, row.numel) - 1;
    const std::int64_t room = kMost - in_run - row.index_start;
    if (row.index_start > kMost - in_run || (row.index_stride > 0 && last_run > room / row.index_stride))
        found.add(place, "has global indices beyond 64 bits: check index_start, index_run and index_stride");
}

}  // namespace

Problems problems_of_step(const Table &table, std::int64_t num_hypers) {
    Findings found;
    found.extents.reserve(5 * table.size);
    for (std::size_t place = 0; place < table.size; ++place) {
        const Row &row = table.rows[place];
        if (!counts(found, place, row)) continue;
        check_param(found, place, row);
        check_grad(found, place, row);
        check_moments(found, place, row);
        check_index(found, place, row);
        if (row.hyper < 0 || row.hyper >= num_hypers)
            found.add(place, "hyper is " + std::to_string(row.hyper) + "; there are " + std::to_string(num_hypers));
    }
    found.require_disjoint();
    return found.problems;
}

Problems problems_of_grads(const Table &table) {
    Findings found;
    for (std::size_t place = 0; place < table.size; ++place)
        if (counts(found, place, table.rows[place])) check_grad(found, place, table.rows[place]);
    return found.problems;
}

Problems problems_of_moments(const Table &table) {
    Findings found;
    for (std::size_t place = 0; place < table.size; ++place)
        if (counts(found, place, table.rows[place])) check_moments(found, place, table.rows[place]);
    found.require_disjoint();
    return found.problems;
}

}  // namespace shardopt
