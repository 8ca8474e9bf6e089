// Which ISA levels this build has and this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "level.h"

namespace shardopt {

// Names of the levels this CPU can run, worst first.
std::vector<std::string> available_isas();

// The named level; an empty name means the best one available.
// Throws std::invalid_argument for a level this build does not have or this CPU cannot run.
const Level &level_named(const std::string &isa);

}  // namespace shardopt
