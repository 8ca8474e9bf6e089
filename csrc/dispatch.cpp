// Run-time choice of an ISA level. Compiled for the baseline CPU, like every file but the two that carry ISA flags.
#include "dispatch.h"

#include <stdexcept>

namespace shardopt {
namespace {

struct Choice {
    const char *name;
    const Level &level;
    bool (*runs_here)();
};

bool always() { return true; }

#if defined(SHARDOPT_X86_LEVELS)
// __builtin_cpu_supports also asks whether the operating system saves the wider registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
#endif

const Choice choices[] = {
    {"scalar", level_scalar, always},
    {"lanes16", level_lanes16, always},
#if defined(SHARDOPT_X86_LEVELS)
    {"avx2", level_avx2, has_avx2},
    {"avx512", level_avx512, has_avx512},
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
    for (const Choice &choice : choices)
        if (choice.runs_here()) names.emplace_back(choice.name);
    return names;
}

const Level &level_named(const std::string &isa) {
    const Level *best = nullptr;
    bool known = false;
    for (const Choice &choice : choices) {
        const bool named = isa == choice.name;
        known = known || named;
        if ((isa.empty() || named) && choice.runs_here()) best = &choice.level;
    }
    if (best == nullptr)
        throw std::invalid_argument("ISA level '" + isa + "' " +
                                    (known ? "cannot run on this CPU" : "is not in this build of shardopt") +
                                    "; available here: " + joined(available_isas()));
    return *best;
}

}  // namespace shardopt
