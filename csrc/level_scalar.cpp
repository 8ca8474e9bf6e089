// One lane at a time, for any CPU: the reference the other levels are compared with.
#include "level_body.h"

namespace shardopt {

constexpr Level level_scalar = level_of<OneLane>();

}  // namespace shardopt
