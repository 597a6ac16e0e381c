"""Facts about a server: its hardware, its configuration, and where a declared setting contradicts them."""

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
    """`info`: the answer of `/server_info`, ours or SGLang's; `name` and the price are the caller's."""
    reported = {
        "name": name,
        "usd_per_hour": usd_per_hour,
        **{key: server_fact(info, key) for key in ("backend", "device", "device_kind", "dtype")},
        "versions": info.get("versions") or _only_version(info),
        "memory": info.get("memory"),
    }
    return {**{key: value for key, value in reported.items() if value is not None}, "client": _this_machine()}


def hardware_name(hardware: Mapping[str, Any]) -> str | None:
    """What two runs must share to be of the same hardware; None where nothing is known.

    The caller's name counts. Else the device's, without each backend's additions: cpu (2 threads) is a
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


DELIMITER = "multi_item_scoring_delimiter"


# What the caller may declare, by the names of SGLang's server flags, and what our own server calls it.
OWN_NAMES = {
    "multi_item_scoring_chunk_size": "chunk_size",
    "multi_item_mask_impl": "mask",
    "multi_item_segment_fallback_threshold": "segment_fallback_threshold",
    DELIMITER: "delimiter_token_id",
}


# The options of `bench matrix` for them, in the same order.
MATRIX_FLAGS = (
    "--jax-server-chunk-size",
    "--jax-mask-impl",
    "--jax-segment-fallback-threshold",
    "--delimiter-token-id",
)


_SUMMARY = ("backend", "device", "dtype")


_BACKENDS = {"torch": "pytorch", "pytorch": "pytorch", "jax": "jax"}


# No configuration: what changes by itself, and what says where rather than how.
_METRICS = ("status", "uptime_seconds", "memory", "stats", "internal_states", "prefix_cache")


_PLACES = ("host", "port", "nccl_port", "dist_init_addr", "random_seed")


# Secrets are never printed or written. Token ids and special tokens have names like those of passwords: of names
# with `token` only some are secret.
_SECRET_NAME = re.compile(r"api[_-]?key|passw(or)?d|passphrase|secret|credential", re.IGNORECASE)


_SECRET_TOKEN = re.compile(r"^token$|(hf|hub|auth|access|api|bearer|refresh|session)[_-]?token$", re.IGNORECASE)


# Words that every contradiction has and no other note.
_BUT = ", but the server "


def server_config(info: Mapping[str, Any], declared: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Flat, as the server says it; `declared` stands beside it, and fills in what the server does not say."""
    reported = _reported(info)
    return {**declared, **reported, "declared": dict(declared), "base_url": base_url}


def without_secrets(value: Any) -> Any:
    """A copy of what a server reports, at any depth without what must not be printed or written, by its name."""
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items() if not _is_secret(str(key), each)}
    return [without_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str, value: object) -> bool:
    return bool(_SECRET_NAME.search(name) or (isinstance(value, str) and _SECRET_TOKEN.search(name)))


def lasting_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what differs between two starts of the same server, and without the caller's note."""
    return {key: value for key, value in config.items() if key not in (*_PLACES, "base_url", "note")}


def contradictions(
    info: Mapping[str, Any], declared: Mapping[str, Any], backend: str, model: str, served: list[str]
) -> list[str]:
    """One sentence for each thing that the caller says otherwise than the server."""
    reported = _reported(info)
    found = []
    for key, value in declared.items():
        known_as = next((name for name in (key, OWN_NAMES.get(key, key)) if name in reported), None)
        if known_as is not None and reported[known_as] != value:
            found.append(f"declared {key} = {value}{_BUT}says {known_as} = {reported[known_as]}")
    own_backend = server_fact(info, "backend")
    if is_other_backend(own_backend, backend):
        found.append(f"declared backend = {backend}{_BUT}says backend = {own_backend}")
    if served and model not in (*served, own_model_name(info)):
        found.append(f"the workload was made for {model}{_BUT}has {', '.join(served)}")
    return found


def is_contradiction(note: str) -> bool:
    """Is it one of those sentences?"""
    return _BUT in note


def is_other_backend(reported: object, backend: str) -> bool:
    """Does the server name a backend that we know, and not this one?"""
    return _BACKENDS.get(str(reported), backend) != backend


def own_model_name(info: Mapping[str, Any]) -> str | None:
    """What our servers call the model that they have loaded, under whichever name they serve it."""
    model = info.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return None if name is None else str(name)


def server_summary(info: Mapping[str, Any]) -> str:
    """Model, backend, device and dtype on one line, as far as the server reports them."""
    named = [own_model_name(info) or info.get("model_path"), *(server_fact(info, key) for key in _SUMMARY)]
    return ", ".join(str(each) for each in named if isinstance(each, str)) or "its model and device are not reported"


def served_names(models: Mapping[str, Any]) -> list[str]:
    """The model names in the answer of `/v1/models`."""
    listed = models.get("data")
    return [str(each["id"]) for each in listed if "id" in each] if isinstance(listed, list) else []


def _reported(info: Mapping[str, Any]) -> dict[str, Any]:
    configuration = info.get("configuration")
    reported = configuration if isinstance(configuration, Mapping) else info
    return {key: value for key, value in without_secrets(reported).items() if key not in _METRICS}
