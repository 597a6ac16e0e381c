"""The group `ops`: which function is which verb."""

from __future__ import annotations

from collections.abc import Callable

import typer

from itemwise.cli.harness_verbs import as_verb
from itemwise.cli.ops.collect import collect
from itemwise.cli.ops.compare_backends import compare_backends
from itemwise.cli.ops.doctor import doctor
from itemwise.cli.ops.install import install
from itemwise.cli.ops.sweep import matrix, smoke

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
