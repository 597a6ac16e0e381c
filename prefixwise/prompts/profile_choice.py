"""Profiles by name, by file and by checkpoint: those of the package, those of users, and the one that fits a model."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ProfileError, TokenizerError, quote
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, as_float32
from prefixwise.prompts.chat_places import chat_frame
from prefixwise.prompts.cross_encoder import profile_of_cross_encoder
from prefixwise.prompts.guard import GuardKind, guard_of
from prefixwise.prompts.profile import MAX_RERANK_CLASSES, Profile, many_classes, parse_profile
from prefixwise.prompts.tokenizer import TextTokenizer

# Files


_SUFFIX = ".toml"
RESERVED_NAME = "default"  # requests may use it for the model's own profile
_FOLDER = files("prefixwise.prompts").joinpath("profiles")


@cache
def builtin_profiles() -> dict[str, Profile]:
    """The profiles of the package, by name, which is also the name of the file."""
    names = sorted(entry.name for entry in _FOLDER.iterdir() if entry.name.endswith(_SUFFIX))
    profiles = [_parse(_FOLDER.joinpath(name).read_bytes(), name) for name in names]
    return {profile.name: profile for profile in profiles}


def builtin_profile_text(name: str) -> str:
    """The text of the file, as a start for a new profile. Raises ProfileError."""
    return _FOLDER.joinpath(builtin_profile(name).name + _SUFFIX).read_text(encoding="utf-8")


def builtin_profile(name: str) -> Profile:
    """Raises ProfileError, which lists the names."""
    profiles = builtin_profiles()
    if name not in profiles:
        known = ", ".join(profiles)
        raise ProfileError(f"no profile is called {quote(name)}; expected {known}, or a path that ends in {_SUFFIX}")
    return profiles[name]


def find_profile(name_or_path: str | Path) -> Profile:
    """A profile of the package by name, or a file by path. Raises ProfileError."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or text.endswith(_SUFFIX) or "/" in text
    return read_profile(Path(text)) if is_path else builtin_profile(text)


def read_profile(path: Path) -> Profile:
    """A user's file. Raises ProfileError."""
    try:
        content = path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # no such file, or no home folder
        raise ProfileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    profile = _parse(content, str(path))
    problems = list(_problems_of_users(profile))
    if problems:
        raise ProfileError(f"{path} is not a profile: {'; '.join(problems)}")
    return profile


def _problems_of_users(profile: Profile) -> Iterator[str]:
    """What only profiles of the package may do."""
    known = builtin_profiles()
    if profile.name in known or profile.name == RESERVED_NAME:
        yield f"name {quote(profile.name)} is taken; choose another name"
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
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ProfileError(f"{origin} is not TOML: {error}") from None
    return parse_profile(data, origin)


# Choice


FOR_ANY_MODEL = "chat-yes-no"
DEFAULT = RESERVED_NAME
_SAME_DIRECTION = 0.999  # cosine; rows are rounded to bfloat16, and further training changes a head more than that


@dataclass(frozen=True)
class ProfileChoice:
    """The profile of requests that name none, and the profiles that requests may name."""

    default: Profile | None  # None: a classifier without a known profile, or with too many classes to rerank
    reason: str  # for people
    by_name: Mapping[str, Profile]
    warning: str | None = None  # part of every response
    can_rerank: bool = True  # False: no profile fits the model's head
    guard: GuardKind | None = None  # how the model classifies messages as unsafe, if it is a guard


def choose_profile(asked: Profile | None, checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> ProfileChoice:
    """The profile that the user asks for, or the one that fits the checkpoint."""
    choice = _choose(asked, checkpoint, tokenizer)
    return replace(choice, guard=guard_of(checkpoint.names, checkpoint.config.family))


def _choose(asked: Profile | None, checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> ProfileChoice:
    by_name = dict(builtin_profiles())
    if asked is not None:
        return ProfileChoice(asked, "asked for", {**by_name, asked.name: asked})
    for name in checkpoint.names:
        for profile in builtin_profiles().values():
            if _is_named(profile, _last_part(name), checkpoint.config.family):
                return ProfileChoice(profile, f"the model is called {name}", by_name)
    if checkpoint.logit_score is not None and tokenizer is not None:
        own = profile_of_cross_encoder(checkpoint.logit_score, tokenizer)
        if own is not None:
            return ProfileChoice(own, "the model's folder says how it scores", {**by_name, own.name: own})
    if checkpoint.config.num_classes > MAX_RERANK_CLASSES:
        return ProfileChoice(None, many_classes(checkpoint.config.num_classes), by_name, can_rerank=False)
    if checkpoint.config.num_classes:
        return _by_head(checkpoint, tokenizer, by_name)
    return profile_of_any_model(checkpoint.name, tokenizer)


def profile_of_any_model(model: str = "this model", tokenizer: TextTokenizer | None = None) -> ProfileChoice:
    """The profile of models without a known profile: every response has a warning."""
    profile, why = builtin_profile(FOR_ANY_MODEL), ""
    failure = None if tokenizer is None else chat_failure(tokenizer)
    if failure is not None and profile.without_chat_template is not None:
        profile, why = builtin_profile(profile.without_chat_template), f" ({failure})"
    warning = (
        f"no reranker profile is known for {model}, so {profile.name} was used{why}; "
        "for a model that was trained to rerank, name its own profile"
    )
    return ProfileChoice(profile, "none is known for the model", dict(builtin_profiles()), warning)


def chat_failure(tokenizer: TextTokenizer) -> str | None:
    """Why the tokenizer has no usable chat template; None if it has one."""
    if tokenizer.chat_template is None:
        return "it has no chat template"
    try:
        chat_frame(tokenizer.chat_template, tokenizer.special_tokens)
    except TokenizerError as error:
        return str(error)
    return None


def _last_part(name: str) -> str:
    """The last part of a hub id or a path; folders above may have any name."""
    return name.rstrip("/").rpartition("/")[2]


def _is_named(profile: Profile, name: str, family: str) -> bool:
    is_family = not profile.families or family in profile.families
    return is_family and any(fnmatchcase(name.lower(), pattern) for pattern in profile.names)


def _by_head(checkpoint: Checkpoint, tokenizer: TextTokenizer | None, by_name: Mapping[str, Profile]) -> ProfileChoice:
    """Finds the profile of a classifier whose head was made from the rows of the profile's labels."""
    fitting = [
        profile
        for profile in by_name.values()
        if profile.names and not profile.classifier and tokenizer is not None
        if not profile.families or checkpoint.config.family in profile.families
        if _head_is_of(profile, checkpoint, tokenizer)
    ]
    if fitting:
        return ProfileChoice(fitting[0], "the model's head is made of its labels' rows", by_name, _several_fit(fitting))
    return ProfileChoice(None, "the model is a classifier that no profile is known for", by_name)


def _several_fit(fitting: Sequence[Profile]) -> str | None:
    if len(fitting) == 1:
        return None
    names = [profile.name for profile in fitting]
    return (
        f"the model's head fits the profiles {', '.join(names)}, so {names[0]} was used; choose one with --profile, or "
        "name it in the request"
    )


def _head_is_of(profile: Profile, checkpoint: Checkpoint, tokenizer: TextTokenizer) -> bool:
    """Compares with the embedding, which has the label rows of models with a tied head."""
    ids = [*profile.label_token_ids, *(tokenizer.token_id(label) for label in profile.labels)]
    embedding, head = checkpoint.tensors["embedding"], _rows(checkpoint.tensors["head"], 0, None)
    if any(label_id is None or label_id >= embedding.shape[0] for label_id in ids):
        return False
    labels = np.concatenate([_rows(embedding, int(label_id), 1) for label_id in ids if label_id is not None])
    direction = labels[0] - labels[1] if len(labels) == 2 else labels[0]
    made = head[1] - head[0] if len(head) == 2 else head[0]
    length = np.linalg.norm(direction) * np.linalg.norm(made)
    return bool(length > 0 and made @ direction / length > _SAME_DIRECTION)


def _rows(tensor: StoredTensor, start: int, count: int | None) -> NDArray[np.float32]:
    stop = tensor.shape[0] if count is None else start + count
    return as_float32(tensor.read_rows(start, stop), tensor.dtype)


def fitting_profile(profile: Profile, by_name: Mapping[str, Profile], tokenizer: TextTokenizer) -> Profile:
    """The profile, or the one that it names for models without a usable chat template. Raises ProfileError."""
    other = profile.without_chat_template
    if not profile.chat or other is None or chat_failure(tokenizer) is None:
        return profile
    if other not in by_name:
        raise ProfileError(f"prompt.without_chat_template must be one of {', '.join(by_name)}, got {quote(other)}")
    return by_name[other]


def needed_profile(choice: ProfileChoice) -> str | None:
    """Why rerank requests must name a profile, and which; None if they need none, or if no profile fits."""
    return None if choice.default is not None or not choice.can_rerank else _how_to_choose(choice)


def _how_to_choose(choice: ProfileChoice) -> str:
    known = ", ".join(name for name, profile in choice.by_name.items() if profile.names)
    return (
        f"{choice.reason}: choose one with --profile; known profiles are {known}; or write one, a .toml file, with "
        "classifier = true for a head of one row"
    )


def profile_of(choice: ProfileChoice, name: str | None) -> Profile:
    """The profile of a request. No name and "default" mean the model's own. Raises ProfileError."""
    if name not in (None, DEFAULT):
        if name not in choice.by_name:
            raise ProfileError(f"profile must be one of {', '.join(choice.by_name)}, got {quote(str(name))}")
        return choice.by_name[name]
    if not choice.can_rerank:
        raise ProfileError(choice.reason)
    if choice.default is None:
        raise ProfileError(_how_to_choose(choice))
    return choice.default
