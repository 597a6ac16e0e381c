"""The page's files, which the server sends and reports take their look from."""

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
    """A file with all that its response says about it."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """All of them by name, read once."""
    folder = files("prefixwise.web").joinpath("static")
    found: dict[str, PageFile] = {}
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        media_type = _MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            found[entry.name] = PageFile(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')
    return found


@cache
def report_style() -> str:
    """The style sheet that a report carries inside it, as one file that needs nothing else."""
    return page_text("look.css") + page_text("report.css")


def page_text(name: str) -> str:
    """One file's text."""
    return page_files()[name].content.decode()
