"""Would a pattern find this path? As globs do: `*`, `?` and `[` stay within a name, `**` is any number of folders."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(path: str, pattern: str) -> bool:
    """Both with `/` between names."""
    return _match(path.split("/"), pattern.split("/"))


def _match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, rest = patterns[0], patterns[1:]
    if first == "**":
        return any(_match(names[skipped:], rest) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _match(names[1:], rest)
