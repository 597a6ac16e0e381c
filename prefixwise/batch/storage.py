"""Files wherever they are: a path on this machine or any URL that fsspec knows.

What is written is there whole or not at all: on this machine it gets its name when it is complete, elsewhere a small
object is put at once and a large file is moved to its name.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

from prefixwise.batch.clear_errors import clear_errors
from prefixwise.batch.formats import is_compressed
from prefixwise.batch.glob_match import matches
from prefixwise.batch.needs import needed
from prefixwise.contract.errors import BatchError

_BUFFER_BYTES = 1 << 20
_WILDCARDS = "*?["
# What stores say of an object that changes with its content; some of them also tell when it was read last.
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


@dataclass(frozen=True)
class FoundFile:
    """An input file as it is now."""

    url: str
    name: str  # within the folder that was asked for; of a single file its base name
    size: int
    version: str  # changes when its content does


def find_files(url: str) -> list[FoundFile]:
    """The file, or the files of a folder or a pattern in the order of their names. Raises BatchError for none.

    Names that begin with a dot or an underscore are not data, as elsewhere.
    """
    system, path = _system(url)
    with clear_errors(url):
        if any(each in path for each in _WILDCARDS) and not system.exists(path):
            paths, root = system.glob(path), path[: min(path.find(each) % (len(path) + 1) for each in _WILDCARDS)]
            root = root.rpartition("/")[0]
        elif system.isdir(path):
            paths, root = system.find(path), path
        elif system.exists(path):
            return [_found(system, url, path, path.rpartition("/")[2])]
        else:
            raise BatchError(f"{url}: there is no such file or folder")
        named = [(each, each.removeprefix(root).lstrip("/")) for each in sorted(paths) if system.isfile(each)]
    found = [_found(system, _url_of(system, each), each, name) for each, name in named if not _is_hidden(name)]
    if not found:
        raise BatchError(f"{url}: expected files of rows, got none")
    return found


def find_file(url: str) -> FoundFile:
    """One file as it is now, whatever was known of it. Raises BatchError."""
    system, path = _system(url)
    with clear_errors(url):
        system.invalidate_cache()
    return _found(system, url, path, path.rpartition("/")[2])


def is_several(url: str) -> bool:
    """A folder or a pattern, whose files need names."""
    system, path = _system(url)
    with clear_errors(url):
        return not system.isfile(path)


def open_file(url: str) -> IO[bytes]:
    """For reading, with `seek`; what is in gzip is unpacked on the way. Raises BatchError."""
    system, path = _system(url)
    with clear_errors(url):
        file = system.open(path, "rb")
    if is_compressed(url):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return cast("IO[bytes]", io.BufferedReader(file, _BUFFER_BYTES) if not _is_local(system) else file)


def exists(url: str) -> bool:
    """A file or a folder. Raises BatchError."""
    system, path = _system(url)
    with clear_errors(url):
        return bool(system.exists(path))


def read_bytes(url: str) -> bytes:
    """All of a small file. Raises BatchError."""
    system, path = _system(url)
    with clear_errors(url):
        return cast(bytes, system.cat_file(path))


def write_whole(url: str, content: bytes, within: str | None = None) -> None:
    """A small file, at once; `within` as in `writing`. Raises BatchError."""
    system, path = _system(url)
    if _is_local(system):
        with writing(url, within) as file:
            file.write(content)
        return
    with clear_errors(url):
        system.pipe_file(path, content)


@contextmanager
def writing(url: str, within: str | None = None) -> Iterator[IO[bytes]]:
    """A file of any size, which has its name when the block is left without an error. Raises BatchError.

    `within`: the folder on the same file system in which it is until then; beside its name when left out.
    """
    system, path = _system(url)
    until_then = path if within is None else f"{_system(within)[1]}/{path.rpartition('/')[2]}"
    temporary = f"{until_then}.{uuid4().hex[:8]}.tmp"
    with clear_errors(url):
        if _is_local(system):
            for each in (path, temporary):
                Path(each).parent.mkdir(parents=True, exist_ok=True)
        file = system.open(temporary, "wb")
    try:
        with clear_errors(url):
            with file:
                yield file
                file.flush()
                if _is_local(system):
                    os.fsync(file.fileno())
            _rename(system, temporary, path)
    except BaseException:
        with suppress(OSError):
            system.rm_file(temporary)
        raise


def list_names(folder: str) -> list[str]:
    """Base names of the files in it; none where there is no such folder. Raises BatchError."""
    system, path = _system(folder)
    with clear_errors(folder):
        system.invalidate_cache()
        if not system.isdir(path):
            return []
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False))


def remove_files(folder: str, names: list[str]) -> None:
    """And the folder, where nothing else is in it. Raises BatchError."""
    system, path = _system(folder)
    with clear_errors(folder):
        for name in names:
            system.rm_file(f"{path}/{name}")
    if not list_names(folder):
        with suppress(OSError, NotImplementedError):  # many stores have no folders
            system.rmdir(path)


def remove_file(url: str) -> None:
    """Nothing where it is not there. Raises BatchError."""
    system, path = _system(url)
    with clear_errors(url), suppress(FileNotFoundError):
        system.rm_file(path)


def is_within(url: str, source: str) -> bool:
    """Is the file among those that `find_files(source)` would find, or would it be?"""
    spellings = [(spell(url), spell(source)) for spell in (absolute, resolved)]
    return any(f"{path}/".startswith(f"{root.rstrip('/')}/") or matches(path, root) for path, root in spellings)


def absolute(url: str) -> str:
    """The same file from any folder, so that other processes find it."""
    system, path = _system(url)
    return path if _is_local(system) else _url_of(system, path)


def resolved(url: str) -> str:
    """The same for all spellings of a path on this machine: links and `..` are followed."""
    system, path = _system(url)
    return os.path.realpath(path) if _is_local(system) else absolute(url)


def _system(url: str) -> tuple[Any, str]:
    """The file system and the path in it. Raises BatchError where what reads it is not installed."""
    with needed("fsspec"):
        from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise BatchError(f"{url}: {error}") from None
    return system, path


def _is_local(system: Any) -> bool:
    return "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def _url_of(system: Any, path: str) -> str:
    return path if _is_local(system) else str(system.unstrip_protocol(path))


def _found(system: Any, url: str, path: str, name: str) -> FoundFile:
    with clear_errors(url):
        info = system.info(path)
        version = str(Path(path).stat().st_mtime_ns) if _is_local(system) else _version(system, path, info)
    return FoundFile(absolute(url), name, int(info["size"]), version)


def _version(system: Any, path: str, info: dict[str, Any]) -> str:
    told = {name: str(info[name]) for name in _VERSION_FIELDS if info.get(name) is not None}
    return json.dumps(told) if told else str(system.ukey(path))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _rename(system: Any, old: str, new: str) -> None:
    if _is_local(system):
        Path(old).replace(new)
    else:
        system.mv(old, new)
