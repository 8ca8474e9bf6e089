// Run-time choice of an ISA level. Compiled for the baseline CPU, like every file but the two that carry ISA flags.
#include "dispatch.h"

#include <stdexcept>

namespace shardopt {
namespace {

struct Level {
    const char *name;
    AdamWStep adamw;
    bool (*runs_here)();
};

bool always() { return true; }

#if defined(SHARDOPT_X86_LEVELS)
// __builtin_cpu_supports also asks whether the operating system saves the wider registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
#endif

const Level levels[] = {
    {"scalar", adamw_scalar, always},
    {"lanes16", adamw_lanes16, always},
#if defined(SHARDOPT_X86_LEVELS)
    {"avx2", adamw_avx2, has_avx2},
    {"avx512", adamw_avx512, has_avx512},
#endif
};

std::string joined(const std::vector<std::string> &names) {
    std::string text;
    for (const std::string &name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Level &level : levels)
        if (level.runs_here()) names.emplace_back(level.name);
    return names;
}

AdamWStep adamw_step_for(const std::string &isa) {
    AdamWStep best = nullptr;
    bool known = false;
    for (const Level &level : levels) {
        const bool named = isa == level.name;
        known = known || named;
        if ((isa.empty() || named) && level.runs_here()) best = level.adamw;
    }
    if (best == nullptr)
        throw std::invalid_argument("ISA level '" + isa + "' " +
                                    (known ? "cannot run on this CPU" : "is not in this build of shardopt") +
                                    "; available here: " + joined(available_isas()));
    return best;
}

}  // namespace shardopt
