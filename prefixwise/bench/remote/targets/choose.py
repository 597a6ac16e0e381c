"""Opens a target by its address; PROJECT, TPU_NAME, TPU_ZONE, GPU_NAME and GPU_ZONE complete it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from prefixwise.bench.remote.targets.base import Target, TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudGpuTarget, GcloudTpuTarget
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget

KINDS = "local, ssh://user@host:port, gcloud-tpu://NAME or gcloud-gpu://NAME"


def default_target(environment: Mapping[str, str] = os.environ) -> str:
    """The TPU VM that the environment names, else this machine."""
    return f"gcloud-tpu://{environment['TPU_NAME']}" if environment.get("TPU_NAME") else "local"


def open_target(
    text: str, environment: Mapping[str, str] = os.environ, *, project: str | None = None, zone: str | None = None
) -> Target:
    """`project` and `zone` override PROJECT and TPU_ZONE or GPU_ZONE. Nothing is contacted. Raises TargetError."""
    scheme, separator, address = text.partition("://")
    if text == "local":
        return LocalTarget()
    if separator and scheme == "ssh":
        return SshTarget.parse(address)
    if separator and scheme == "gcloud-tpu":
        return _gcloud(GcloudTpuTarget, "TPU", address, environment, project, zone)
    if separator and scheme == "gcloud-gpu":
        return _gcloud(GcloudGpuTarget, "GPU", address, environment, project, zone)
    raise TargetError(f"a target must be {KINDS}, got {text!r}")


def _gcloud(
    kind: type[GcloudTpuTarget] | type[GcloudGpuTarget],
    prefix: str,
    address: str,
    environment: Mapping[str, str],
    project: str | None,
    zone: str | None,
) -> Target:
    def needed(variable: str, given: str | None) -> str:
        value = given or environment.get(variable, "")
        if not value:
            raise TargetError(f"{kind.scheme}://{address} needs {variable}, which is not set")
        return value

    name = needed(f"{prefix}_NAME", address.removesuffix("/"))
    return kind.parse(name, needed("PROJECT", project), needed(f"{prefix}_ZONE", zone))
