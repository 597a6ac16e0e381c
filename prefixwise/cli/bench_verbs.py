"""The groups `bench` and `validate`: which function is which verb."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from prefixwise.bench.processes import ended_by_signals
from prefixwise.cli.bench.ab import bench_ab
from prefixwise.cli.bench.check import bench_check
from prefixwise.cli.bench.compare import compare
from prefixwise.cli.bench.load import bench_load
from prefixwise.cli.bench.matrix import matrix
from prefixwise.cli.bench.report import report
from prefixwise.cli.bench.schema import bench_schema
from prefixwise.cli.bench.workload import bench_workload
from prefixwise.cli.bench_common import with_json_line
from prefixwise.cli.commands import Verbs
from prefixwise.cli.failures import needing
from prefixwise.cli.validate.combine import validate_combine
from prefixwise.cli.validate.endpoint import validate_endpoint
from prefixwise.cli.validate.gate import validate_gate
from prefixwise.cli.validate.models import validate_models
from prefixwise.cli.validate.quantization import validate_quantization
from prefixwise.cli.validate.self_check import validate_self

_PACKAGES = ("httpx", "pydantic")

bench = Verbs()
validate = Verbs()


def as_verb(verb: Callable[..., None]) -> Callable[..., None]:
    """What it stands on may be missing, which is one clear line; what it starts is stopped, whatever ends it."""
    with_option = with_json_line(verb)

    @wraps(with_option)
    def run(**given: Any) -> None:
        with needing(_PACKAGES, "the harness", "harness"), ended_by_signals():
            with_option(**given)

    return run


_BENCH: dict[str, Callable[..., None]] = {
    "workload": bench_workload,
    "matrix": matrix,
    "compare": compare,
    "report": report,
    "check": bench_check,
    "schema": bench_schema,
    "ab": bench_ab,
    "load": bench_load,
}
_VALIDATE: dict[str, Callable[..., None]] = {
    "endpoint": validate_endpoint,
    "combine": validate_combine,
    "gate": validate_gate,
    "models": validate_models,
    "quantization": validate_quantization,
    "self": validate_self,
}

for _name, _verb in _BENCH.items():
    bench.command(_name)(as_verb(_verb))
for _name, _verb in _VALIDATE.items():
    validate.command(_name)(as_verb(_verb))
