"""The machines behind `gcloud-tpu://` and `gcloud-gpu://` themselves: made, looked at, waited for, deleted.

They cost money while they exist. Nothing here asks: a verb shows the command line first, and asks. Not run against a
real project; held to the documented command lines.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import dataclass

from prefixwise.bench.remote.targets.base import ConnectionLostError, Done, OnLine, Target, TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudTarget, GcloudTpuTarget, gcloud_words
from prefixwise.bench.remote.targets.processes import run_streamed

PATIENCE_SECONDS = 600.0  # for a machine that was made to answer over ssh
_PAUSE_SECONDS = 10.0
_UP = {"READY", "RUNNING"}  # of a TPU, of an instance
_DOWN = {"DELETING", "HIDDEN", "PREEMPTED", "STOPPED", "STOPPING", "SUSPENDED", "SUSPENDING", "TERMINATED"}


@dataclass(frozen=True)
class ResourceOptions:
    """What a machine is made of where it has to be made."""

    # a TPU
    accelerator_type: str = "v6e-1"
    runtime_version: str = "v2-alpha-tpuv6e"
    # a GPU
    machine_type: str = "g4-standard-48"
    image_family: str = "ubuntu-accelerator-2404-amd64-with-nvidia-580"  # the driver is in it
    image_project: str = "ubuntu-os-accelerator-images"
    boot_disk_size: str = "200GB"
    boot_disk_type: str = "hyperdisk-balanced"  # G4 has no other kind; empty: Compute Engine's choice


@dataclass(frozen=True)
class Resource:
    """A machine that there is."""

    kind: str  # v6e-1, g4-standard-48
    state: str  # in gcloud's words


def as_gcloud(target: Target) -> GcloudTarget:
    """Raises TargetError: this machine and those over ssh are nobody's to make."""
    if not isinstance(target, GcloudTarget):
        raise TargetError(f"only gcloud-tpu:// and gcloud-gpu:// targets can be created or deleted, got {target.name}")
    return target


def create_command(target: GcloudTarget, options: ResourceOptions) -> list[str]:
    """As it is run, and as it is shown before."""
    if isinstance(target, GcloudTpuTarget):
        return target.resource_command(
            "create", f"--accelerator-type={options.accelerator_type}", f"--version={options.runtime_version}"
        )
    flags = [
        f"--machine-type={options.machine_type}",
        f"--image-family={options.image_family}",
        f"--image-project={options.image_project}",
        f"--boot-disk-size={options.boot_disk_size}",
        "--maintenance-policy=TERMINATE",  # a machine with a GPU cannot be moved
    ]
    if options.boot_disk_type:
        flags.append(f"--boot-disk-type={options.boot_disk_type}")
    return target.resource_command("create", *flags)


def describe_command(target: GcloudTarget) -> list[str]:
    """Changes nothing."""
    return target.resource_command("describe", "--format=json")


def delete_command(target: GcloudTarget) -> list[str]:
    """The machine and its boot disk."""
    return target.resource_command("delete")


def describe(target: GcloudTarget) -> Resource | None:
    """None where there is no such machine. Raises TargetError where that cannot be told."""
    done = run_streamed(describe_command(target))
    if done.status != 0:
        if _is_missing(target, done):
            return None
        raise TargetError(f"{target.name} cannot be looked at: {gcloud_words(done) or done.words}")
    try:
        told = json.loads(done.output)
        kind, state = told.get("acceleratorType") or told["machineType"], told.get("state") or told["status"]
    except (AttributeError, KeyError, ValueError):
        expected = "a JSON object with a type and a state"
        raise TargetError(f"{target.name}: expected {expected} from describe, got {done.output[:200]!r}") from None
    return Resource(str(kind).rsplit("/", 1)[-1], str(state))


def ensure(
    target: GcloudTarget,
    options: ResourceOptions,
    say: OnLine,
    patience_seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = _PAUSE_SECONDS,
) -> bool:
    """A machine that answers; true where it was made now. One that there is stays as it is. Raises TargetError.

    Interrupting does not undo: what gcloud has asked for is made.
    """
    found = describe(target)
    if found is None:
        command = create_command(target, options)
        say(shlex.join(command))
        done = run_streamed(command, say)
        if done.status != 0:
            raise TargetError(f"{target.name} cannot be created: {gcloud_words(done) or done.words}")
    else:
        say(f"{target.name} exists already ({found.kind}, {found.state}): it is used as it is")
    wait_until_answers(target, say, patience_seconds, pause_seconds)
    return found is None


def wait_until_answers(
    target: GcloudTarget,
    say: OnLine,
    patience_seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = _PAUSE_SECONDS,
) -> None:
    """Over ssh. A way that is not there yet is waited for; no permission, or a machine that is down, is an error."""
    end = time.monotonic() + patience_seconds
    while (problem := _not_yet(target)) is not None:
        if time.monotonic() + pause_seconds > end:
            raise TargetError(f"{target.name} did not answer within {patience_seconds:g} s: {problem}")
        say(f"{target.name} does not answer yet: {problem}")
        time.sleep(pause_seconds)


def delete(target: GcloudTarget, say: OnLine) -> bool:
    """False where there was nothing to delete. Raises TargetError."""
    command = delete_command(target)
    say(shlex.join(command))
    done = run_streamed(command, say)
    if done.status == 0:
        return True
    if _is_missing(target, done):
        say(f"{target.name} is not there: nothing to delete")
        return False
    raise TargetError(f"{target.name} cannot be deleted, and may still cost: {gcloud_words(done) or done.words}")


def _not_yet(target: GcloudTarget) -> str | None:
    """Why one has to wait; None where it answers. Raises TargetError where waiting is of no use."""
    found = describe(target)
    if found is None:
        raise TargetError(f"{target.name} is not there (zone {target.zone}, project {target.project})")
    if found.state in _DOWN:
        raise TargetError(f"{target.name} exists but is {found.state}: start it, or delete it and create it again")
    if found.state not in _UP:
        return f"it is {found.state}"
    try:
        target.check_reachable()
    except ConnectionLostError as error:
        return str(error)
    return None


def _is_missing(target: GcloudTarget, done: Done) -> bool:
    """Of the machine itself: a project or a zone that is not found is a mistake to be told."""
    return re.search(rf"/(nodes|instances)/{re.escape(target.instance)}' was not found", done.complaints) is not None
