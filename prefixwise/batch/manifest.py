"""The manifest of a job: its input files, the options that decide its scores, and its parts. Resuming compares it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from prefixwise._version import __version__
from prefixwise.batch.parts import InputFile, Part
from prefixwise.batch.requests import RowDefaults
from prefixwise.contract.errors import BatchError, ModelLoadError
from prefixwise.launch.options import EngineOptions
from prefixwise.models.sources import embedded_model_path

_FORMAT = 1
_KEY_LETTERS = 12


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the output."""

    files: tuple[InputFile, ...]
    options: Mapping[str, object]  # plain JSON
    parts: tuple[Part, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @cached_property
    def key(self) -> str:
        """A short hash; other jobs have another."""
        return sha256(self.to_json()).hexdigest()[:_KEY_LETTERS]

    def to_json(self) -> bytes:
        content = {
            "format": _FORMAT,
            "options": self.options,
            "files": [asdict(file) for file in self.files],
            "parts": [astuple(part)[1:] for part in self.parts],
        }
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, content: bytes, url: str) -> Manifest:
        """Raises BatchError for other content, or another version's manifest."""
        try:
            fields = json.loads(content)
            if fields["format"] != _FORMAT:
                raise BatchError(f"{url}: expected a job of format {_FORMAT}, got {fields['format']}; use --overwrite")
            files = tuple(InputFile(**file) for file in fields["files"])
            parts = tuple(Part(index, *numbers) for index, numbers in enumerate(fields["parts"]))
            _check_types(files, parts, fields["options"])
            return cls(files, fields["options"], parts)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BatchError(f"{url} does not describe a job: {error!r}; use --overwrite") from None


def _check_types(files: Sequence[InputFile], parts: Sequence[Part], options: object) -> None:
    """Raise TypeError for a field that no manifest of ours has."""
    for file in files:
        texts = (file.url, file.name, file.format, file.version)
        if not all(isinstance(text, str) for text in texts) or not _is_count(file.size):
            raise TypeError(f"no file of a job is {file}")
    for part in parts:
        if not all(map(_is_count, astuple(part))) or part.file >= len(files) or part.start > part.stop:
            raise TypeError(f"no part of a job is {part}")
    if not isinstance(options, dict):
        raise TypeError(f"options must be an object, got {options!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def check_same_job(known: Manifest, asked: Manifest) -> None:
    """Raises BatchError, which names the differences, where resuming would mix two jobs."""
    differences = [*_option_differences(known, asked), *_file_differences(known, asked)]
    if differences:
        shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
        raise BatchError(f"this is not the job that was begun: {shown}; use --overwrite to begin anew")


def _option_differences(known: Manifest, asked: Manifest) -> list[str]:
    before, now = known.options, json.loads(json.dumps(asked.options))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {json.dumps(before.get(name))}, got {json.dumps(now.get(name))}" for name in names]


def _file_differences(known: Manifest, asked: Manifest) -> list[str]:
    before, now = ({file.url: file for file in each.files} for each in (known, asked))
    gone = [f"{url} was in the input, and is not any more" for url in before if url not in now]
    new = [f"{url} is new in the input" for url in now if url not in before]
    changed = [f"{url} has changed" for url in before if url in now and before[url] != now[url]]
    return [*gone, *new, *changed]


# These change speed and memory, and no scores.
_NOT_IN_SCORES = frozenset(
    (
        *("warmup", "compilation_cache_dir", "weight_cache", "prefix_cache_bytes", "prefix_cache"),
        *("max_queued_tokens", "max_items_per_request"),
    )
)


def job_options(engine: EngineOptions | str, defaults: RowDefaults) -> dict[str, object]:
    """Everything that decides a job's scores, as plain JSON, under the names of the command line's options.

    `engine`: the options of the model in this process, or the address of a server, whose model is its own.
    """
    return {
        "prefixwise": __version__,
        **({"url": engine} if isinstance(engine, str) else _engine_options(engine)),
        "score_defaults": dict(defaults.score),
        "rerank_defaults": dict(defaults.rerank),
        "id_field": defaults.id_field,
    }


def _engine_options(engine: EngineOptions) -> dict[str, object]:
    of_engine = {name: _plain(value) for name, value in asdict(engine).items() if name not in _NOT_IN_SCORES}
    return {
        **of_engine,
        "model_files": _model_files(engine.model),
        "profile_content": _profile_content(engine.profile),
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _model_files(model: str | Path | None) -> list[list[object]]:
    """Name, size and time of change of a local model's files; none for a hub id."""
    if model is None:
        return _embedded_file()
    if not Path(model).exists():
        return []
    path = Path(model)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]


def _embedded_file() -> list[list[object]]:
    """Without its time of change: installing the same package again changes nothing."""
    try:
        path = embedded_model_path()
    except ModelLoadError:  # loading reports it
        return []
    return [[path.name, path.stat().st_size]]


def _profile_content(profile: str | Path | None) -> str | None:
    """A hash of a user's own file; built-in profiles belong to prefixwise's version."""
    if profile is None:
        return None
    try:
        return sha256(Path(profile).expanduser().read_bytes()).hexdigest()
    except (OSError, RuntimeError):  # a built-in profile, or an unknown one, which loading reports
        return None
