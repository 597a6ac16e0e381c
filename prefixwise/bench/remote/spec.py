"""The specification of a run on a target, sent to the agent as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from prefixwise._version import __version__
from prefixwise.contract.errors import ArtifactError

CHUNK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 500)
SMOKE_CHUNK_SIZE = 32
ARTIFACT_ROOT = "reports/artifacts"
EMBEDDED = "embedded"
HEARTBEAT_SECONDS = 5.0  # interval of the heartbeats to an agent
SILENCE_SECONDS = 60.0  # without a heartbeat, after which the agent considers its caller gone
_MAX_PORT = 65535
_CALL_FIELDS = ("prefixwise", "run", "take_over", "new_folder")


@dataclass(frozen=True)
class Spec:
    """The fields of every specification, and its JSON form."""

    prefixwise: str = field(default=__version__, kw_only=True)  # version of the caller
    run: str = field(default="", kw_only=True)  # the run's token for the target's lock
    take_over: bool = field(default=False, kw_only=True)  # take the target's lock from another run

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Raises ArtifactError if the caller has another version."""
        content: dict[str, Any] = json.loads(line)
        version = content.get("prefixwise")
        if version != __version__:
            remedy = "run prefixwise ops install --target TARGET"
            raise ArtifactError(
                f"expected prefixwise {version or 'of another version'}, got {__version__} here ({remedy})"
            )
        known = {each.name for each in fields(cls)}
        if content.keys() != known:
            other = ", ".join(sorted(content.keys() ^ known))
            raise ArtifactError(f"the two sides have different versions: {other} (run prefixwise ops install)")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class SweepSpec(Spec):
    """A sweep over the server's chunk sizes."""

    folder: str = ""  # on the target
    new_folder: bool = False  # the name is generated: choose another if it exists
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES
    model: str = "Qwen/Qwen3-0.6B"
    backend: str = "auto"
    dtype: str = "auto"
    algorithm: str = "packed"
    mask: str = "dense"
    segment_fallback_threshold: int = 0
    query_tokens: int = 2000
    num_items: int = 500
    item_tokens: int = 20
    warmup_runs: int = 1
    timed_runs: int = 5
    timeout_sec: float = 180.0
    start_timeout_sec: float = 900.0
    port: int = 0
    hardware: str = ""
    server_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ArtifactError."""
        if not 0 <= self.port <= _MAX_PORT:
            raise ArtifactError(f"the port must be 0 to {_MAX_PORT}, got {self.port}")

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that define the sweep, without those of a single call, as JSON values."""
        content = {name: value for name, value in asdict(self).items() if name not in _CALL_FIELDS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}

    @property
    def workload_ref(self) -> str:
        return f"canonical-{self.query_tokens}-{self.num_items}-{self.item_tokens}"

    def flags_of(self, chunk_size: int) -> list[str]:
        """The server's flags for this chunk size."""
        return [
            *(() if self.model == EMBEDDED else ("--model-path", self.model)),
            *("--backend", self.backend, "--dtype", self.dtype, "--algorithm", self.algorithm),
            *("--multi-item-mask-impl", self.mask),
            *("--multi-item-segment-fallback-threshold", str(self.segment_fallback_threshold)),
            *("--multi-item-scoring-chunk-size", str(chunk_size), "--disable-radix-cache"),
            *self.server_flags,
        ]


@dataclass(frozen=True)
class ClientMatrixSpec(Spec):
    """One server, and a sweep over the client's chunk sizes."""

    folder: str  # on the target; contains the workload
    name: str  # of the matrix: jax_portable
    server_flags: tuple[str, ...]
    matrix_flags: tuple[str, ...]  # of `prefixwise bench matrix`, without addresses and files
    start_timeout_sec: float = 900.0
    port: int = 0
