"""The group `ops`: which function is which verb."""

from __future__ import annotations

from collections.abc import Callable

import typer

from prefixwise.cli.harness_verbs import as_verb
from prefixwise.cli.ops.collect import collect
from prefixwise.cli.ops.compare_backends import compare_backends
from prefixwise.cli.ops.doctor import doctor
from prefixwise.cli.ops.install import install
from prefixwise.cli.ops.sweep import matrix, smoke

ops = typer.Typer()

_VERBS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "install": install,
    "smoke": smoke,
    "matrix": matrix,
    "collect": collect,
    "compare-backends": compare_backends,
}

for _name, _verb in _VERBS.items():
    ops.command(_name)(as_verb(_verb))
