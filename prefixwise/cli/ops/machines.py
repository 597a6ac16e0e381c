"""Google Cloud machines of a comparison: created before it and deleted after it, if asked for.

Every command is printed before it runs; on a terminal it has to be confirmed.
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
    from prefixwise.bench.remote.compare.run import CompareSide
    from prefixwise.bench.remote.targets.base import Target

_FLAGS = {
    "accelerator_type": Flag(str, "Accelerator type of a TPU VM.", "NAME"),
    "runtime_version": Flag(str, "Runtime version of a TPU VM.", "NAME"),
    "machine_type": Flag(str, "Machine type of a GPU VM.", "NAME"),
    "image_family": Flag(str, "Image family of a GPU VM.", "NAME"),
    "image_project": Flag(str, "Image project of a GPU VM.", "NAME"),
    "boot_disk_size": Flag(str, "Boot disk size of a GPU VM.", "SIZE"),
    "boot_disk_type": Flag(str, "Boot disk type of a GPU VM; empty: Google's default.", "NAME"),
}

with_machine_options = with_flags("machines", ResourceOptions, _FLAGS, panel="Machines that --create-resources makes")


class Machines:
    """The targets that can be created and deleted."""

    def __init__(self, targets: Sequence[Target], options: ResourceOptions, *, create: bool, delete: bool) -> None:
        """Raises CommandError if creating or deleting is asked for and no target allows it."""
        self._targets = {target.name: target for target in targets if isinstance(target, GcloudTarget)}
        self._options = options
        self._create = create
        self._delete = delete
        self._created: set[str] = set()
        if (create or delete) and not self._targets:
            asked = "--create-resources" if create else "--teardown"
            given = ", ".join(dict.fromkeys(target.name for target in targets))
            raise CommandError(f"{asked} is for gcloud-tpu:// and gcloud-gpu:// targets, got {given}", status=MISUSED)

    def create(self, sides: Sequence[CompareSide]) -> None:
        """Create the machines that `sides` need, and install prefixwise on them. Raises TargetError."""
        for target in self._targets.values() if self._create else ():
            here = [side for side in sides if side.agent.target.name == target.name]
            if not here:
                continue
            if describe(target) is None and not _confirmed(create_command(target, self._options), "Create it?"):
                raise CommandError(f"{target.name} does not exist, and its creation was not confirmed")
            if ensure(target, self._options, _say):
                self._created.add(target.name)
                _install(target, here)

    @contextmanager
    def reported_after_failure(self) -> Iterator[None]:
        """After a failure, print how to delete the machines: the run can be resumed on them, but they cost money."""
        try:
            yield
        except BaseException:
            if self._create or self._delete:
                for target in self._targets.values():
                    say(f"{target.name} is left as it is; to delete it: {shlex.join(delete_command(target))}")
            raise

    def remove(self, used: Collection[str]) -> None:
        """Delete the machines after a successful run, if asked for. Raises TargetError.

        `used`: the targets of the run. A machine that the run did not use is never deleted.
        """
        if not self._delete:
            return
        for target in self._targets.values():
            if target.name not in (*used, *self._created):
                how = shlex.join(delete_command(target))
                say(f"{target.name} is left as it is, because nothing was measured on it; to delete it: {how}")
            elif _confirmed(delete_command(target), "Delete it?"):
                delete(target, _say)
            else:
                say(f"{target.name} is left as it is")


def _install(target: GcloudTarget, sides: Sequence[CompareSide]) -> None:
    """Install prefixwise on a new machine."""
    from prefixwise.bench.remote.install import COMMON_EXTRAS, InstallPlan, install_on

    jax = "jax-tpu" if isinstance(target, GcloudTpuTarget) else "jax-cuda"
    own = [jax if side.backend == "jax" else "torch" for side in sides]
    install_on(target, InstallPlan(extras=(*COMMON_EXTRAS, *own)), _say)


def _confirmed(command: Sequence[str], question: str) -> bool:
    """Ask on a terminal; without one, the given command line is the confirmation."""
    if not _is_interactive():
        return True  # the command is printed when it runs
    say(shlex.join(command))
    return typer.confirm(question, err=True)


def _is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))  # None: closed


def _say(line: str) -> None:
    say(f"  {line}")
