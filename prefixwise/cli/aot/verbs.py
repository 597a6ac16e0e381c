"""The group `aot`: by itself one request on one slice, and `matrix`."""

from __future__ import annotations

import typer

from prefixwise.cli.aot.matrix import matrix
from prefixwise.cli.aot.programs import aot as programs

aot = typer.Typer()
aot.callback(invoke_without_command=True)(programs)
aot.command("matrix")(matrix)
