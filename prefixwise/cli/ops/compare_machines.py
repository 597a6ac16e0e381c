"""The machines of a comparison, where they are Google Cloud's: made before it and deleted after it, if asked for.

Every command is shown before it is run; where somebody sits at a terminal, it is asked for, too.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from prefixwise.bench.remote.resources import (
    ResourceOptions,
    create_command,
    delete,
    delete_command,
    describe,
    ensure,
)
from prefixwise.bench.remote.targets.gcloud import GcloudTarget, GcloudTpuTarget
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.output import say

if TYPE_CHECKING:
    from prefixwise.bench.remote.compare.preflight import CompareSide
    from prefixwise.bench.remote.targets.base import Target

_FLAGS = {
    "accelerator_type": Flag(str, "Of a TPU VM.", "NAME"),
    "runtime_version": Flag(str, "Of a TPU VM.", "NAME"),
    "machine_type": Flag(str, "Of a GPU VM.", "NAME"),
    "image_family": Flag(str, "Of a GPU VM.", "NAME"),
    "image_project": Flag(str, "Of a GPU VM.", "NAME"),
    "boot_disk_size": Flag(str, "Of a GPU VM.", "SIZE"),
    "boot_disk_type": Flag(str, "Of a GPU VM; empty: Google's choice.", "NAME"),
}

with_machine_options = with_flags("machines", ResourceOptions, _FLAGS, panel="Machines that --create-resources makes")


class Machines:
    """Those among the targets that can be made and deleted."""

    def __init__(self, targets: Sequence[Target], options: ResourceOptions, *, create: bool, delete: bool) -> None:
        """Raises CommandError where there are none, and something is to be done with them."""
        self._targets = {target.name: target for target in targets if isinstance(target, GcloudTarget)}
        self._options = options
        self._create = create
        self._delete = delete
        self._created: set[str] = set()
        if (create or delete) and not self._targets:
            asked = "--create-resources" if create else "--teardown"
            given = ", ".join(dict.fromkeys(target.name for target in targets))
            raise CommandError(f"{asked} is for gcloud-tpu:// and gcloud-gpu:// targets, got {given}", status=MISUSED)

    def make(self, sides: Sequence[CompareSide]) -> None:
        """Those of them that something is to be measured on, with prefixwise on them. Raises TargetError."""
        for target in self._targets.values() if self._create else ():
            here = [side for side in sides if side.agent.target.name == target.name]
            if not here:
                continue
            if describe(target) is None and not _agreed(create_command(target, self._options), "Create it?"):
                raise CommandError(f"{target.name} is not there, and was not to be created")
            if ensure(target, self._options, _say):
                self._created.add(target.name)
                _install(target, here)

    @contextmanager
    def told_after_failure(self) -> Iterator[None]:
        """Nothing is deleted then: what is there may be gone on with. But it costs."""
        try:
            yield
        except BaseException:
            if self._create or self._delete:
                for target in self._targets.values():
                    say(f"{target.name} is left as it is; to delete it: {shlex.join(delete_command(target))}")
            raise

    def remove(self, used: Collection[str]) -> None:
        """After a run that ended well, where it is asked for. Raises TargetError.

        `used`: where it measured. A machine of this name that it had nothing to do with is somebody's.
        """
        if not self._delete:
            return
        for target in self._targets.values():
            if target.name not in (*used, *self._created):
                how = shlex.join(delete_command(target))
                say(f"{target.name} is left as it is, as nothing was measured on it; to delete it: {how}")
            elif _agreed(delete_command(target), "Delete it?"):
                delete(target, _say)
            else:
                say(f"{target.name} is left as it is")


def _install(target: GcloudTarget, sides: Sequence[CompareSide]) -> None:
    """A machine that was made a moment ago has nothing of ours."""
    from prefixwise.bench.remote.install.install import COMMON_EXTRAS, InstallPlan, install_on

    jax = "jax-tpu" if isinstance(target, GcloudTpuTarget) else "jax-cuda"
    own = [jax if side.backend == "jax" else "torch" for side in sides]
    install_on(target, InstallPlan(extras=(*COMMON_EXTRAS, *own)), _say)


def _agreed(command: Sequence[str], question: str) -> bool:
    """Where nobody is there to be asked, the command line that was given is the answer."""
    if not _somebody_is_there():
        return True  # it is shown as it is run
    say(shlex.join(command))
    return typer.confirm(question, err=True)


def _somebody_is_there() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))  # None: it was closed


def _say(line: str) -> None:
    say(f"  {line}")
