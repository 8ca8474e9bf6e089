// Scalar AdamW step: the reference the other levels are compared with, and the tail of each.
#include "adamw_body.h"

namespace shardopt {

void adamw_scalar(const AdamWBuffers &buffers, const AdamWScalars &scalars) {
    step_lanes<OneLane>(buffers, scalars, 0);
}

}  // namespace shardopt
