"""Files on this machine or behind any URL that fsspec knows.

A file that we write is complete or absent: on this machine it gets its name when it is complete; elsewhere a small file
is put at once and a large one is moved to its name. On S3 a large one is a multipart upload to its name, which nobody
sees until it is completed; one that breaks is aborted. s3fs and botocore send again what a store did not take.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

from prefixwise.contract.errors import BatchError
from prefixwise.host import install_command, replacing

_BUFFER_BYTES = 1 << 20
_WILDCARDS = "*?["
# Fields of a store's description that change with the content. (Other fields may change with every read.) Where there
# is one of the content, times do not count: a listing may have other digits of them than the file's own description.
_CONTENT_FIELDS = ("ETag", "etag", "generation", "md5Hash")
_TIME_FIELDS = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class FoundFile:
    """An input file as it is now."""

    url: str
    name: str  # relative to the given folder; a single file has its base name
    size: int
    version: str  # changes when its content does


def find_files(url: str) -> list[FoundFile]:
    """The file, or the files of a folder or a pattern, sorted by name. Raises BatchError where there are none.

    Names that begin with a dot or an underscore are not data, as in other tools.
    """
    system, path = _system(url)
    with file_errors(url):
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
    """One file as it is now, past any cache of the file system. Raises BatchError."""
    system, path = _system(url)
    with file_errors(url):
        system.invalidate_cache()
    return _found(system, url, path, path.rpartition("/")[2])


def has_many_files(url: str) -> bool:
    """Whether the URL is a folder or a pattern, so that rows must name their file."""
    system, path = _system(url)
    with file_errors(url):
        return not system.isfile(path)


def is_gzip(name: str) -> bool:
    """By its suffix."""
    return name.lower().endswith(".gz")


def open_file(url: str) -> IO[bytes]:
    """Open for reading, with `seek`; gzip is unpacked on the way. Raises BatchError."""
    system, path = _system(url)
    with file_errors(url):
        file = system.open(path, "rb")
    if is_gzip(url):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return cast("IO[bytes]", io.BufferedReader(file, _BUFFER_BYTES) if not _is_local(system) else file)


def exists(url: str) -> bool:
    """Whether there is such a file or folder. Raises BatchError."""
    system, path = _system(url)
    with file_errors(url):
        return bool(system.exists(path))


def read_bytes(url: str) -> bytes:
    """All of a small file. Raises BatchError."""
    system, path = _system(url)
    with file_errors(url):
        return cast(bytes, system.cat_file(path))


def write_file(url: str, content: bytes, within: str | None = None) -> None:
    """Write a small file; `within` as in `writing`. Raises BatchError."""
    system, path = _system(url)
    if _is_local(system):
        with writing(url, within) as file:
            file.write(content)
        return
    with file_errors(url):
        system.pipe_file(path, content)


@contextmanager
def writing(url: str, within: str | None = None) -> Iterator[IO[bytes]]:
    """Write a file of any size, which gets its name when the block ends without an error. Raises BatchError.

    `within`: the folder on the same file system that holds it until then; the folder of `url` when left out.
    """
    system, path = _system(url)
    folder = path.rpartition("/")[0] if within is None else _system(within)[1]
    if _is_local(system):
        with file_errors(url), replacing(Path(path), Path(folder)) as temporary, temporary.open("wb") as file:
            yield file
        return
    if _is_s3(system):
        with file_errors(url), _uploading(system, path) as file:
            yield file
        return
    remote = f"{folder}/{path.rpartition('/')[2]}.{uuid4().hex[:8]}.tmp"
    try:
        with file_errors(url):
            with system.open(remote, "wb") as file:
                yield file
            system.mv(remote, path)
    except BaseException:
        with suppress(OSError):
            system.rm_file(remote)
        raise


@contextmanager
def _uploading(system: Any, path: str) -> Iterator[IO[bytes]]:
    """A multipart upload that is completed at the end of the block, or aborted after an error."""
    file = system.open(path, "wb", autocommit=False)
    try:
        yield file
        file.close()
        file.commit()
    except BaseException:
        file.closed = True  # else the garbage collector would upload the rest
        with suppress(*_failures()):  # the store may be away; `abort_uploads` of the next run has another chance
            file.discard()
        raise


def abort_uploads(urls: Sequence[str]) -> None:
    """Abort uploads of these files that a killed process has left: nobody sees them, and stores charge for them.

    On S3, where the account may list uploads. Elsewhere there are none. Raises BatchError.
    """
    for url in urls:
        system, path = _system(url)
        if not _is_s3(system):
            continue
        bucket, key, _ = system.split_path(path)
        with file_errors(url):
            try:
                listed = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            except PermissionError:
                continue
            for upload in listed.get("Uploads", ()):
                if upload["Key"] == key:
                    system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])


def list_names(folder: str) -> list[str]:
    """Base names of the files in the folder; none where it does not exist. Raises BatchError."""
    system, path = _system(folder)
    with file_errors(folder):
        system.invalidate_cache()
        if not system.isdir(path):
            return []
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False))


def remove_files(folder: str, names: list[str]) -> None:
    """Remove the files, and the folder if it is empty then. Raises BatchError."""
    system, path = _system(folder)
    with file_errors(folder):
        for name in names:
            system.rm_file(f"{path}/{name}")
    if not list_names(folder):
        with suppress(OSError, NotImplementedError):  # many stores have no folders
            system.rmdir(path)


def remove_file(url: str) -> None:
    """Remove the file if it exists. Raises BatchError."""
    system, path = _system(url)
    with file_errors(url), suppress(FileNotFoundError):
        system.rm_file(path)


def is_within(url: str, source: str) -> bool:
    """Whether `find_files(source)` finds the file, or would find it once it exists."""
    spellings = [(spell(url), spell(source)) for spell in (absolute, resolved)]
    return any(f"{path}/".startswith(f"{root.rstrip('/')}/") or _matches(path, root) for path, root in spellings)


def absolute(url: str) -> str:
    """The URL as an absolute path, valid in other processes."""
    system, path = _system(url)
    return path if _is_local(system) else _url_of(system, path)


def resolved(url: str) -> str:
    """Equal for all spellings of a path on this machine: links and `..` are followed."""
    system, path = _system(url)
    return os.path.realpath(path) if _is_local(system) else absolute(url)


def _system(url: str) -> tuple[Any, str]:
    """The file system and the path in it. Raises BatchError where its package is not installed."""
    with needed("fsspec"):
        from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise BatchError(f"{url}: {error}") from None
    return system, path


def _is_local(system: Any) -> bool:
    return "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def _is_s3(system: Any) -> bool:
    return "s3" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def _url_of(system: Any, path: str) -> str:
    return path if _is_local(system) else str(system.unstrip_protocol(path))


def _found(system: Any, url: str, path: str, name: str) -> FoundFile:
    with file_errors(url):
        info = system.info(path)
        version = str(Path(path).stat().st_mtime_ns) if _is_local(system) else _version(system, path, info)
    return FoundFile(absolute(url), name, int(info["size"]), version)


def _version(system: Any, path: str, info: dict[str, Any]) -> str:
    for names in (_CONTENT_FIELDS, _TIME_FIELDS):
        fields = {name: str(info[name]) for name in names if info.get(name) is not None}
        if fields:
            return json.dumps(fields)
    return str(system.ukey(path))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


@contextmanager
def file_errors(url: str) -> Iterator[None]:
    """Turn errors of the disk, gzip and Parquet within the block into one line that names the file: BatchError."""
    try:
        yield
    except _failures() as error:
        message = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise BatchError(f"{url}: {message or type(error).__name__}") from None


def _failures() -> tuple[type[Exception], ...]:
    """With those of Arrow, botocore and aiohttp if they are imported."""
    names = (("pyarrow", "ArrowException"), ("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
    of_others = [getattr(sys.modules[module], name) for module, name in names if sys.modules.get(module) is not None]
    return (OSError, EOFError, zlib.error, UnicodeDecodeError, *of_others)


def _matches(path: str, pattern: str) -> bool:
    """Whether the glob pattern finds the path: `*`, `?` and `[` stay within a name, `**` is any number of folders."""
    return _match(path.split("/"), pattern.split("/"))


def _match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, rest = patterns[0], patterns[1:]
    if first == "**":
        return any(_match(names[skipped:], rest) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _match(names[1:], rest)


_EXTRAS = {"pyarrow": "batch", "fsspec": "batch", "ray": "cluster"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """For the block that imports an optional package: its absence is a BatchError with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        command = install_command(_EXTRAS[package])
        raise BatchError(f"{package} is not installed; install it with: {command}") from None
