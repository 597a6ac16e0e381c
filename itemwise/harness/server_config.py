"""How the server was configured: what it says itself, what the caller declares, and where the two disagree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from itemwise.harness.hardware import server_fact

# What the caller may declare, in the words of the origin's server flags, and what our own server calls it.
OWN_NAMES = {
    "multi_item_scoring_chunk_size": "chunk_size",
    "multi_item_mask_impl": "mask",
    "multi_item_segment_fallback_threshold": "segment_fallback_threshold",
}
_BACKENDS = {"torch": "pytorch", "pytorch": "pytorch", "jax": "jax"}
# No configuration: what changes by itself, what says where rather than how, and what is nobody's business.
_FIGURES = ("status", "uptime_seconds", "memory", "stats", "internal_states", "prefix_cache")
_PLACES = ("host", "port", "nccl_port", "dist_init_addr", "random_seed")
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def server_config(info: Mapping[str, Any], declared: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Flat, as the server says it; `declared` stands beside it, and fills in what the server does not say."""
    reported = _reported(info)
    return {**declared, **reported, "declared": dict(declared), "base_url": base_url}


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
            found.append(f"declared {key} = {value}, but the server says {known_as} = {reported[known_as]}")
    own_backend = server_fact(info, "backend")
    if _BACKENDS.get(str(own_backend), backend) != backend:
        found.append(f"declared backend = {backend}, but the server says backend = {own_backend}")
    if served and model not in served:
        found.append(f"the workload was made for {model}, but the server has {', '.join(served)}")
    return found


def served_names(models: Mapping[str, Any]) -> list[str]:
    """Of the answer of `/v1/models`; empty where there is none."""
    listed = models.get("data")
    return [str(each["id"]) for each in listed if "id" in each] if isinstance(listed, list) else []


def _reported(info: Mapping[str, Any]) -> dict[str, Any]:
    configuration = info.get("configuration")
    told = configuration if isinstance(configuration, Mapping) else info
    return {key: value for key, value in told.items() if key not in (*_FIGURES, *_SECRETS)}
