"""The options of a cluster: those of every engine and server, and the number and resources of replicas.

As plain JSON they are the `args` of the Serve application, from a YAML file or from the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from prefixwise.cluster.routing import RoutingOptions
from prefixwise.contract.errors import InvalidValueError, describe
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

API_KEY_VARIABLE = "PREFIXWISE_API_KEY"  # on every replica, so that no configuration file holds the key


@dataclass(frozen=True)
class ScaleOptions:
    """How many replicas, and what each reserves. Raises InvalidValueError."""

    replicas: int = 1  # the number, or the least where `max_replicas` is more
    max_replicas: int | None = None  # more than `replicas`: the number follows the queued tokens
    target_queued_tokens: int = 100_000  # waiting or running per replica, which autoscaling aims for
    fronts: int = 1  # processes that receive HTTP requests and send them to replicas
    gpus_per_replica: float = 0.0
    tpu_chips_per_replica: int = 0
    cpus_per_replica: float = 1.0
    max_ongoing_requests: int = 1000  # on one replica; its queue also has a bound in tokens
    max_wait_steps: float = (
        RoutingOptions.max_wait_steps
    )  # steps that a request waits for its home before it goes elsewhere
    share: float = RoutingOptions.share  # of the average load, which a home may carry before requests go elsewhere

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (name == "max_replicas" and value is None):
                _check_number(name, value, least)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            message = f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}"
            raise InvalidValueError(message, code="invalid_max_replicas", param="max_replicas")

    @property
    def scales(self) -> bool:
        return self.max_replicas is not None and self.max_replicas > self.replicas


_LEAST: dict[str, float] = {
    "replicas": 1,
    "max_replicas": 1,
    "target_queued_tokens": 1,
    "fronts": 1,
    "gpus_per_replica": 0,
    "tpu_chips_per_replica": 0,
    "cpus_per_replica": 0,
    "max_ongoing_requests": 1,
    "max_wait_steps": 0,
    "share": 1,
}
_WHOLE = ("replicas", "max_replicas", "target_queued_tokens", "fronts", "tpu_chips_per_replica", "max_ongoing_requests")


def _check_number(name: str, value: object, least: float) -> None:
    is_valid = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (isinstance(value, int) or name not in _WHOLE)
        and least <= value < math.inf
    )
    if not is_valid:
        kind = "a whole number" if name in _WHOLE else "a number"
        message = f"{name} must be {kind} of at least {least:g}, got {describe(value)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)


@dataclass(frozen=True)
class Secret:
    """A key on its way to a replica, hidden from Ray's logs and dashboard."""

    value: str | None

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True)
class ClusterOptions:
    """All options of a cluster, to and from JSON."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    scale: ScaleOptions = field(default_factory=ScaleOptions)

    def to_json(self) -> dict[str, Any]:
        """The options that differ from their defaults, without the key."""
        parts = {"engine": self.engine, "server": replace(self.server, api_key=None), "scale": self.scale}
        return {name: changed for name, part in parts.items() if (changed := _changed(part))}

    @classmethod
    def from_json(cls, args: Mapping[str, Any]) -> ClusterOptions:
        """Raises InvalidValueError for unknown names, PrefixwiseError for invalid values."""
        kinds = {"engine": EngineOptions, "server": ServerOptions, "scale": ScaleOptions}
        _check_names("args", args, kinds)
        return cls(**{name: _made(kinds[name], name, part) for name, part in args.items()})

    def with_key(self, sent: str | None) -> ClusterOptions:
        """On a replica: the key that it was sent, or the one of its environment, or none."""
        key = os.environ.get(API_KEY_VARIABLE) if sent is None else sent  # an empty one is an error
        return replace(self, server=replace(self.server, api_key=key))


def _changed(options: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON values."""
    values = {
        each.name: getattr(options, each.name)
        for each in fields(options)
        if getattr(options, each.name) != each.default
    }
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _made(kind: type, where: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise InvalidValueError(f"{where} must be a mapping, got {describe(values)}", code="invalid_args", param=where)
    known = {each.name: each for each in fields(kind) if each.default is not MISSING}
    _check_names(where, values, known)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _check_names(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        message = f"{where} must have names out of {', '.join(known)}, got {', '.join(map(repr, unknown))}"
        raise InvalidValueError(message, code="unknown_option", param=where)
