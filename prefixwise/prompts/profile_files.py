"""Profiles by name and by path: the files that come with the package, and those of its users."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import ProfileError
from prefixwise.prompts.profile import Profile, parse_profile

_SUFFIX = ".toml"
RESERVED_NAME = "default"  # what a request may call the model's own
_FOLDER = files("prefixwise.prompts").joinpath("profiles")


@cache
def builtin_profiles() -> dict[str, Profile]:
    """All that come with the package, by name, which is the file's too."""
    names = sorted(entry.name for entry in _FOLDER.iterdir() if entry.name.endswith(_SUFFIX))
    profiles = [_parse(_FOLDER.joinpath(name).read_bytes(), name) for name in names]
    return {profile.name: profile for profile in profiles}


def builtin_profile_text(name: str) -> str:
    """The file, for people to start their own from. Raises ProfileError."""
    return _FOLDER.joinpath(builtin_profile(name).name + _SUFFIX).read_text(encoding="utf-8")


def builtin_profile(name: str) -> Profile:
    """Raises ProfileError, which lists the names."""
    profiles = builtin_profiles()
    if name not in profiles:
        known = ", ".join(profiles)
        raise ProfileError(f"no profile is called {quote(name)}; expected {known}, or a path that ends in {_SUFFIX}")
    return profiles[name]


def find_profile(name_or_path: str | Path) -> Profile:
    """By the name of one of ours, or by the path of a file. Raises ProfileError."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or text.endswith(_SUFFIX) or "/" in text
    return read_profile(Path(text)) if is_path else builtin_profile(text)


def read_profile(path: Path) -> Profile:
    """A user's file. Raises ProfileError."""
    try:
        content = path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # no such file; no such home
        raise ProfileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    profile = _parse(content, str(path))
    problems = list(_problems_of_users(profile))
    if problems:
        raise ProfileError(f"{path} is no profile: {'; '.join(problems)}")
    return profile


def _problems_of_users(profile: Profile) -> Iterator[str]:
    """What is legal in a file of ours alone."""
    known = builtin_profiles()
    if profile.name in known or profile.name == RESERVED_NAME:
        yield f"name {quote(profile.name)} is taken; call it otherwise"
    if not profile.can_rerank:
        yield 'relevance "from_request" is that of plain; expected softmax, logit, logit_diff or prob'
    other = profile.without_chat_template
    if other is not None and other not in known:
        yield f"prompt.without_chat_template must be one of {', '.join(known)}, got {quote(other)}"


def _parse(content: bytes, origin: str) -> Profile:
    try:
        data = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ProfileError(f"{origin} is not UTF-8: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{origin} is not TOML: {error}") from None
    return parse_profile(data, origin)
