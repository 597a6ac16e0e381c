"""Servers that a run before this one has left: found by their records, and stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixwise.bench.remote.on_target.running import left_over
from prefixwise.bench.remote.targets.base import TargetError


def stop_left(say: Callable[[str], None], take_over: bool) -> dict[str, Any]:
    """A server whose agent still runs is somebody's: it is stopped only where that is asked for. Raises TargetError."""
    stopped = []
    for path, record in left_over():
        where = f"server {record.server.process_id} of {record.run}, started {record.since}"
        if record.agent.is_running and not take_over:
            raise TargetError(f"{where}, is still measured by process {record.agent.process_id}: --take-over ends it")
        # The agent first, which stops its server; whatever is left of the two then goes.
        if not (record.agent.stop() and record.server.stop()):
            raise TargetError(f"{where}, cannot be stopped: process {record.agent.process_id} looks after it")
        path.unlink(missing_ok=True)
        say(f"stopped what an earlier run has left: {where}")
        stopped.append(record.server.process_id)
    return {"stopped": stopped}
