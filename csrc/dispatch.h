// Which ISA levels this build has and this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "adamw.h"

namespace shardopt {

// Names of the levels this CPU can run, worst first.
std::vector<std::string> available_isas();

// The step of the named level; an empty name means the best one available.
// Throws std::invalid_argument for a level this build does not have or this CPU cannot run.
AdamWStep adamw_step_for(const std::string &isa);

}  // namespace shardopt
