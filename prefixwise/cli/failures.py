"""Errors on stderr: an `error:` line, a `hint:` line if there is a remedy, and an exit status."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import typer

from prefixwise.cli.output import say, visible
from prefixwise.contract.errors import (
    ClientSettingError,
    ModelLoadError,
    PrefixwiseError,
    ProfileError,
    RequestError,
    TokenizerError,
)
from prefixwise.host import install_command

FAILED = 1
MISUSED = 2

_PROFILE_HINT = "`prefixwise profiles` lists the built-in profiles and checks your profile files"
# The contract's messages name the fields of a request; these name the options that set them.
_HINTS_BY_CODE = {
    "context_too_long": "--max-tokens-per-item N truncates long items, --on-item-error report skips them",
    "deadline_too_short": "--timeout-sec gives a server more time, up to its own --request-timeout",
    "delimiter_collision": "omit --delimiter-token-id; --on-item-error report skips such items",
    "dense_mask_too_large": "try --mask segment, a smaller --chunk-size, or --algorithm prefill_extend",
    "empty_documents": "a documents file holds one document per line",
    "empty_items": "an items file holds one item per line",
    "invalid_profile": _PROFILE_HINT,
    "label_not_single_token": 'most words are one token when a space precedes them, as in --label " yes"; '
    "--label-scoring sequence accepts labels of any length",
    "unreachable": "--url names a running server; `prefixwise serve` starts one",
    "wrong_label_count": "give --label once for each label",
}
# Hints that depend on the field as well.
_HINTS_BY_FIELD = {
    ("conflicting_parameters", "score_mode"): "--softmax is short for --score-mode softmax",
    ("conflicting_parameters", "instruction"): "omit --instruction, or choose another --profile",
    (
        "context_too_long",
        "documents",
    ): "omit --no-truncate to truncate it; --max-chunks-per-doc N scores more of it",
    ("context_too_long", "query"): "use a shorter --query or --instruction",
}
_MODEL_HINT = "`prefixwise models` lists the supported families and the models on this machine"
_TOKENIZER_HINT = "the command line scores text; prefixwise.Scorer in Python scores token ids too"


class CommandError(Exception):
    """An error of the command line alone: options that exclude each other, an unreadable file."""

    def __init__(self, message: str, *, hint: str | None = None, status: int = FAILED) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status


@contextmanager
def needing(packages: Collection[str], what: str, extra: str) -> Iterator[None]:
    """For the block that imports the packages: without one, a CommandError with the command that installs the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        hint = f"install what {what} needs with: {install_command(extra)}"
        raise CommandError(f"{package} is not installed", hint=hint) from None


def report_failure(error: PrefixwiseError | CommandError | typer.TyperException) -> int:
    """Print the error and its hint; return the exit status."""
    if isinstance(error, CommandError):
        message, hint, status = str(error), error.hint, error.status
    elif isinstance(error, PrefixwiseError):
        message, hint = str(error), _hint(error)
        status = MISUSED if isinstance(error, ClientSettingError) else FAILED
    else:
        message, hint, status = error.format_message(), _usage_hint(error), error.exit_code
    print_error(message)
    if hint is not None:
        say(f"hint: {hint}")
    return status


def print_error(message: str) -> None:
    """One line, even if the message has several."""
    say(f"error: {visible(' '.join(message.splitlines()))}", style="red")


def print_warning(message: str) -> None:
    """One line, even if the message has several."""
    say(f"warning: {visible(message)}", style="yellow")


def _hint(error: PrefixwiseError) -> str | None:
    if isinstance(error, RequestError):
        return _HINTS_BY_FIELD.get((error.code, error.param or ""), _HINTS_BY_CODE.get(error.code))
    if isinstance(error, ProfileError):
        return _PROFILE_HINT
    if isinstance(error, ModelLoadError):
        return _MODEL_HINT
    return _TOKENIZER_HINT if isinstance(error, TokenizerError) else None


def _usage_hint(error: typer.TyperException) -> str | None:
    # Typer's usage errors carry the command's context, but their class is not public.
    context: typer.Context | None = getattr(error, "ctx", None)
    return None if context is None else f"{context.command_path} --help lists the options"
