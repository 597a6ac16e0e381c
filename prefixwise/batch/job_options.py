"""All that decides about a job's scores, as plain JSON: a job is resumed only where none of it has changed."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from prefixwise._version import __version__
from prefixwise.batch.requests import RowDefaults
from prefixwise.contract.errors import ModelLoadError
from prefixwise.launch.options import EngineOptions
from prefixwise.models.embedded import embedded_model_path

# These decide about speed and memory, and not about scores.
_OF_NO_MATTER = frozenset(
    (
        *("warmup", "compilation_cache_dir", "weight_cache", "prefix_cache_bytes", "prefix_cache"),
        *("max_queued_tokens", "max_items_per_request"),
    )
)


def job_options(engine: EngineOptions, defaults: RowDefaults) -> dict[str, object]:
    """Names as people know them, so that a difference can be told."""
    of_engine = {name: _plain(value) for name, value in asdict(engine).items() if name not in _OF_NO_MATTER}
    return {
        "prefixwise": __version__,
        **of_engine,
        "model_files": _model_files(engine.model),
        "profile_content": _profile_content(engine.profile),
        "score_defaults": dict(defaults.score),
        "rerank_defaults": dict(defaults.rerank),
        "id_field": defaults.id_field,
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _model_files(model: str | Path | None) -> list[list[object]]:
    """Name, size and time of change of a model on this machine; nothing of one that is known by its name alone."""
    if model is None:
        return _embedded_file()
    if not Path(model).exists():
        return []
    path = Path(model)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]


def _embedded_file() -> list[list[object]]:
    """Without its time, for to install the same package again changes nothing."""
    try:
        path = embedded_model_path()
    except ModelLoadError:  # which whoever loads it says
        return []
    return [[path.name, path.stat().st_size]]


def _profile_content(profile: str | Path | None) -> str | None:
    """A hash of a user's own file; those that come with prefixwise are of its version."""
    if profile is None:
        return None
    try:
        return sha256(Path(profile).expanduser().read_bytes()).hexdigest()
    except (OSError, RuntimeError):  # one of ours, or none at all, which whoever loads it says
        return None
