"""`prefixwise ops install`: this prefixwise onto a target, in a virtual environment of its own."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from prefixwise.bench.remote.doctor.checkup import VENV
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.harness_common import last_line
from prefixwise.cli.ops.options import ProjectOption, TargetOption, ZoneOption, open_target
from prefixwise.cli.output import say
from prefixwise.cli.text_table import visible

BackendExtra = Literal["auto", "torch", "jax", "jax-cuda", "jax-tpu"]


def install(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="What the venv is made with: Python 3.11 to 3.13; found when left out."),
    ] = None,
    venv: Annotated[str, typer.Option(metavar="DIR", help="On the target: made, or brought up to date.")] = VENV,
    backend: Annotated[
        BackendExtra, typer.Option(help="What to install for it; auto: jax-tpu on a TPU, else torch.")
    ] = "auto",
    extras: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Instead: these extras alone, like server,harness,torch,jax-cuda."),
    ] = None,
    system_site_packages: Annotated[
        bool,
        typer.Option("--system-site-packages", metavar="", help="See what the target's own Python has, too."),
    ] = False,
    pip_args: Annotated[
        str, typer.Option(metavar="ARGS", help='For pip there, like "--index-url URL" of a PyTorch for CPUs.')
    ] = "",
) -> None:
    """Install this prefixwise on a target: a wheel built here, a venv made there. Again: an upgrade in place."""
    from prefixwise.bench.remote.install.install import InstallPlan, install_on

    if not venv.strip():
        raise CommandError(f"--venv must be a folder on the target, got {venv!r}", status=MISUSED)
    plan = InstallPlan(python, venv, backend, _extras(extras), system_site_packages, _words(pip_args))
    opened = open_target(target, project, zone)
    say(f"target {opened.name}: {plan.venv}")
    installed = install_on(opened, plan, lambda line: say(f"  {visible(line)}"))
    say(f"prefixwise {installed.version} on {opened.name}: {installed.python}")
    if plan.venv_python != opened.default_python:
        say(f"use it with: --target {opened.name} --python {installed.python}")
    last_line({"target": opened.name, **asdict(installed)})


def _extras(text: str | None) -> tuple[str, ...]:
    """Raises CommandError."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise CommandError(f"--extras must be names like server,harness,torch, got {text!r}", status=MISUSED)
    return names


def _words(text: str) -> tuple[str, ...]:
    """As a shell would. Raises CommandError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise CommandError(f"--pip-args cannot be split into words: {error}", status=MISUSED) from None
