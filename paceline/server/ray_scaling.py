"""What Ray Serve calls to choose the number of engines: by their predicted queue time. Ray copies this module.

The statistics are those of `EngineReplica.record_autoscaling_stats`; Ray applies the delays and the bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_ENOUGH = 0.5  # of the slots for running requests may be in use on average after an engine is stopped
_MAX_GROWTH = 2.0  # in one decision


def scale_by_queue_time(context: AutoscalingContext) -> tuple[int, dict[str, object]]:
    """The number of engines, and no state. `context`: Ray's AutoscalingContext."""
    current, metrics = context.current_num_replicas, context.aggregated_metrics or {}
    queue_time = list(metrics.get("queue_time", {}).values())
    busy = sum(metrics.get("busy", {}).values())
    if not queue_time:  # none has reported yet
        return context.target_num_replicas, {}
    mean = sum(queue_time) / len(queue_time)
    if mean > 1:
        return math.ceil(current * min(mean, _MAX_GROWTH)), {}
    if current > 1 and mean < 0.5 and busy / (current - 1) <= _ENOUGH:
        return current - 1, {}
    return context.target_num_replicas, {}
