"""What a run was measured on: the server's machine in its own words, and the client's."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any

from prefixwise.host import cpu_name

_DEVICE = re.compile(r"(\d+ x )?(\w+)(?::\d+)?(?: \((.+)\))?")  # 2 x gpu (NVIDIA H200), cuda:0 (NVIDIA H200), cpu
_THREADS = re.compile(r"\d+ threads?")


def describe_hardware(
    info: Mapping[str, Any], name: str | None = None, usd_per_hour: float | None = None
) -> dict[str, Any]:
    """`info`: what `/server_info` says, in our words or in SGLang's; `name` and the price are the caller's."""
    told = {
        "name": name,
        "usd_per_hour": usd_per_hour,
        **{key: server_fact(info, key) for key in ("backend", "device", "device_kind", "dtype")},
        "versions": info.get("versions") or _only_version(info),
        "memory": info.get("memory"),
    }
    return {**{key: value for key, value in told.items() if value is not None}, "client": _this_machine()}


def hardware_name(hardware: Mapping[str, Any]) -> str | None:
    """What two runs must share to be of the same hardware; None where nothing is known.

    The caller's name counts. Else the device's, without what each backend adds in its own words: cpu (2 threads) is a
    cpu as any other, and cuda:0 (NVIDIA H200) is the same as gpu (NVIDIA H200).
    """
    if hardware.get("name"):
        return str(hardware["name"])
    title = hardware.get("device") or hardware.get("device_kind")
    found = _DEVICE.fullmatch(str(title)) if title else None
    if found is None:
        return None if title is None else str(title)
    count, kind, inside = found.groups()
    name = kind if inside is None or _THREADS.fullmatch(inside) else inside
    return f"{count or ''}{name}"


def server_fact(info: Mapping[str, Any], key: str) -> Any:
    """One value wherever a server keeps it: in `devices`, in `configuration`, or flat; None where it does not say."""
    devices, configuration = info.get("devices"), info.get("configuration")
    short = key.removeprefix("device_")
    for place, known_as in ((devices, short), (configuration, key), (info, key)):
        if isinstance(place, Mapping) and place.get(known_as) is not None:
            return place[known_as]
    return None


def _only_version(info: Mapping[str, Any]) -> dict[str, Any] | None:
    return {"server": info["version"]} if "version" in info else None


def _this_machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
    }
