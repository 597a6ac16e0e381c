"""How the server was configured: what it says itself, what the caller declares, and where the two disagree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prefixwise.bench.hardware import server_fact

# What the caller may declare, in the words of the origin's server flags, and what our own server calls it.
OWN_NAMES = {
    "multi_item_scoring_chunk_size": "chunk_size",
    "multi_item_mask_impl": "mask",
    "multi_item_segment_fallback_threshold": "segment_fallback_threshold",
}
_BACKENDS = {"torch": "pytorch", "pytorch": "pytorch", "jax": "jax"}
# No configuration: what changes by itself, and what says where rather than how.
_FIGURES = ("status", "uptime_seconds", "memory", "stats", "internal_states", "prefix_cache")
_PLACES = ("host", "port", "nccl_port", "dist_init_addr", "random_seed")
# Nobody's business. Token ids and special tokens have names like those of passwords, so of tokens only some are meant.
_SECRET_NAME = re.compile(r"api[_-]?key|passw(or)?d|passphrase|secret|credential", re.IGNORECASE)
_SECRET_TOKEN = re.compile(r"^token$|(hf|hub|auth|access|api|bearer|refresh|session)[_-]?token$", re.IGNORECASE)
# Words that every contradiction has and no other note.
_BUT = ", but the server "


def server_config(info: Mapping[str, Any], declared: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Flat, as the server says it; `declared` stands beside it, and fills in what the server does not say."""
    reported = _reported(info)
    return {**declared, **reported, "declared": dict(declared), "base_url": base_url}


def without_secrets(value: Any) -> Any:
    """A copy of what a server tells, at any depth without what must not be printed or written, by its name."""
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items() if not _is_secret(str(key), each)}
    return [without_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str, value: object) -> bool:
    return bool(_SECRET_NAME.search(name) or (isinstance(value, str) and _SECRET_TOKEN.search(name)))


def lasting_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what differs between two starts of the same server."""
    return {key: value for key, value in config.items() if key not in (*_PLACES, "base_url")}


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


def is_other_backend(told: object, backend: str) -> bool:
    """Does the server name a backend that we know, and not this one?"""
    return _BACKENDS.get(str(told), backend) != backend


def own_model_name(info: Mapping[str, Any]) -> str | None:
    """What our servers call the model that they have loaded, under whichever name they serve it."""
    model = info.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return None if name is None else str(name)


def served_names(models: Mapping[str, Any]) -> list[str]:
    """Of the answer of `/v1/models`; empty where there is none."""
    listed = models.get("data")
    return [str(each["id"]) for each in listed if "id" in each] if isinstance(listed, list) else []


def _reported(info: Mapping[str, Any]) -> dict[str, Any]:
    configuration = info.get("configuration")
    told = configuration if isinstance(configuration, Mapping) else info
    return {key: value for key, value in without_secrets(told).items() if key not in _FIGURES}
