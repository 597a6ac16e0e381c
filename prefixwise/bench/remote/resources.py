"""The machines of `gcloud-tpu://` and `gcloud-gpu://` targets: created, described, waited for, deleted.

They cost money while they exist. The functions here do not ask for confirmation: the verb prints the command line and
asks. Tested against the documented command lines, not against a real project.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import dataclass

from prefixwise.bench.remote.targets.base import CommandResult, ConnectionLostError, OnLine, Target, TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudTarget, GcloudTpuTarget, gcloud_error
from prefixwise.bench.remote.targets.processes import run_streamed

READY_TIMEOUT_SECONDS = 600.0  # for a new machine to accept ssh
_PAUSE_SECONDS = 10.0
_UP = {"READY", "RUNNING"}  # of a TPU, of an instance
_DOWN = {"DELETING", "HIDDEN", "PREEMPTED", "STOPPED", "STOPPING", "SUSPENDED", "SUSPENDING", "TERMINATED"}


@dataclass(frozen=True)
class ResourceOptions:
    """The properties of a machine to create."""

    # TPU
    accelerator_type: str = "v6e-1"
    runtime_version: str = "v2-alpha-tpuv6e"
    # GPU
    machine_type: str = "g4-standard-48"
    image_family: str = "ubuntu-accelerator-2404-amd64-with-nvidia-580"  # includes the driver
    image_project: str = "ubuntu-os-accelerator-images"
    boot_disk_size: str = "200GB"
    boot_disk_type: str = "hyperdisk-balanced"  # the only type of G4; empty: Compute Engine's default


@dataclass(frozen=True)
class Resource:
    """An existing machine."""

    kind: str  # v6e-1, g4-standard-48
    state: str  # as gcloud names it


def as_gcloud(target: Target) -> GcloudTarget:
    """Raises TargetError for targets that cannot be created: local and ssh."""
    if not isinstance(target, GcloudTarget):
        raise TargetError(f"only gcloud-tpu:// and gcloud-gpu:// targets can be created or deleted, got {target.name}")
    return target


def create_command(target: GcloudTarget, options: ResourceOptions) -> list[str]:
    """The command line that creates the machine."""
    if isinstance(target, GcloudTpuTarget):
        return target.resource_command(
            "create", f"--accelerator-type={options.accelerator_type}", f"--version={options.runtime_version}"
        )
    flags = [
        f"--machine-type={options.machine_type}",
        f"--image-family={options.image_family}",
        f"--image-project={options.image_project}",
        f"--boot-disk-size={options.boot_disk_size}",
        "--maintenance-policy=TERMINATE",  # a machine with a GPU cannot be migrated
    ]
    if options.boot_disk_type:
        flags.append(f"--boot-disk-type={options.boot_disk_type}")
    return target.resource_command("create", *flags)


def describe_command(target: GcloudTarget) -> list[str]:
    """The command line that describes the machine."""
    return target.resource_command("describe", "--format=json")


def delete_command(target: GcloudTarget) -> list[str]:
    """The command line that deletes the machine and its boot disk."""
    return target.resource_command("delete")


def describe(target: GcloudTarget) -> Resource | None:
    """None if the machine does not exist. Raises TargetError if gcloud fails."""
    done = run_streamed(describe_command(target))
    if done.status != 0:
        if _is_missing(target, done):
            return None
        raise TargetError(f"{target.name} cannot be described: {gcloud_error(done) or done.message}")
    try:
        described = json.loads(done.stdout)
        kind = described.get("acceleratorType") or described["machineType"]
        state = described.get("state") or described["status"]
    except (AttributeError, KeyError, ValueError):
        expected = "a JSON object with a type and a state"
        raise TargetError(f"{target.name}: expected {expected} from describe, got {done.stdout[:200]!r}") from None
    return Resource(str(kind).rsplit("/", 1)[-1], str(state))


def ensure(
    target: GcloudTarget,
    options: ResourceOptions,
    say: OnLine,
    timeout_seconds: float = READY_TIMEOUT_SECONDS,
    pause_seconds: float = _PAUSE_SECONDS,
) -> bool:
    """Create the machine if missing, and wait until it accepts ssh. True if it was created. Raises TargetError.

    An interrupt does not undo a creation that gcloud has requested.
    """
    found = describe(target)
    if found is None:
        command = create_command(target, options)
        say(shlex.join(command))
        done = run_streamed(command, say)
        if done.status != 0:
            raise TargetError(f"{target.name} cannot be created: {gcloud_error(done) or done.message}")
    else:
        say(f"{target.name} already exists ({found.kind}, {found.state}) and is used as it is")
    wait_until_answers(target, say, timeout_seconds, pause_seconds)
    return found is None


def wait_until_answers(
    target: GcloudTarget,
    say: OnLine,
    timeout_seconds: float = READY_TIMEOUT_SECONDS,
    pause_seconds: float = _PAUSE_SECONDS,
) -> None:
    """Wait until the machine accepts ssh. Raises TargetError on timeout, missing permission, or a stopped machine."""
    end = time.monotonic() + timeout_seconds
    while (problem := _not_yet(target)) is not None:
        if time.monotonic() + pause_seconds > end:
            raise TargetError(f"{target.name} did not answer within {timeout_seconds:g} s: {problem}")
        say(f"{target.name} does not answer yet: {problem}")
        time.sleep(pause_seconds)


def delete(target: GcloudTarget, say: OnLine) -> bool:
    """False if the machine does not exist. Raises TargetError."""
    command = delete_command(target)
    say(shlex.join(command))
    done = run_streamed(command, say)
    if done.status == 0:
        return True
    if _is_missing(target, done):
        say(f"{target.name} does not exist: nothing to delete")
        return False
    raise TargetError(f"{target.name} cannot be deleted and may still cost money: {gcloud_error(done) or done.message}")


def _not_yet(target: GcloudTarget) -> str | None:
    """Why the machine is not ready; None if it is. Raises TargetError if waiting cannot help."""
    found = describe(target)
    if found is None:
        raise TargetError(f"{target.name} does not exist (zone {target.zone}, project {target.project})")
    if found.state in _DOWN:
        raise TargetError(f"{target.name} exists but is {found.state}: start it, or delete it and create it again")
    if found.state not in _UP:
        return f"it is {found.state}"
    try:
        target.check_reachable()
    except ConnectionLostError as error:
        return str(error)
    return None


def _is_missing(target: GcloudTarget, done: CommandResult) -> bool:
    """True if the machine itself was not found; a missing project or zone is an error."""
    return re.search(rf"/(nodes|instances)/{re.escape(target.instance)}' was not found", done.stderr) is not None
