"""The files of the web page, for the server, and the style sheet of reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    """A file with its media type and ETag."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """All files by name, read once."""
    folder = files("prefixwise.web").joinpath("static")
    found: dict[str, PageFile] = {}
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if _suffix(entry.name) in _MEDIA_TYPES:
            found[entry.name] = page_file_of(entry.name, entry.read_bytes())
    return found


def page_file_of(name: str, content: bytes) -> PageFile:
    """A file with this name and content."""
    return PageFile(content, _MEDIA_TYPES[_suffix(name)], f'"{sha256(content).hexdigest()[:32]}"')


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


@cache
def report_style() -> str:
    """The style sheet that is embedded in a report."""
    return page_text("look.css") + page_text("report.css")


def page_text(name: str) -> str:
    """The text of one file."""
    return page_files()[name].content.decode()
