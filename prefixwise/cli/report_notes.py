"""Notes on stderr about a request that is done: what was cut, how it was computed, how long it took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prefixwise.cli.output import say
from prefixwise.cli.text_table import visible

if TYPE_CHECKING:
    from prefixwise.cli.run_request import Finished
    from prefixwise.contract.result import Truncation, Usage

MAX_NAMED = 5  # items that a note names; the others are counted


def tell_cut(truncated: Sequence[Truncation], num_items: int, noun: str) -> None:
    """Which items were cut short, and to how many tokens."""
    if not truncated:
        return
    indices = ", ".join(str(cut.index) for cut in truncated[:MAX_NAMED])
    more = ", ..." if len(truncated) > MAX_NAMED else ""
    kept = {cut.kept_tokens for cut in truncated}
    num_tokens = ("at most " if len(kept) > 1 else "") + count(max(kept), "token")
    tell_warning(f"{len(truncated)} of {count(num_items, noun)} cut to {num_tokens}: index {indices}{more}")


def tell_warning(message: str) -> None:
    """On one line, whatever it quotes."""
    say(f"warning: {visible(message)}", style="yellow")


def tell_debug(debug: Mapping[str, object] | None) -> None:
    """The debug block, one line per key and per batch; its layout is for pictures."""
    for key, value in (debug or {}).items():
        if key == "layout":
            continue
        if isinstance(value, list):
            for position, entry in enumerate(value):
                say(f"{key}[{position}]: {json.dumps(entry)}")
        else:
            say(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")


def what_ran(model: str, finished: Finished[object], debug: Mapping[str, object] | None) -> str:
    """The model, where it ran and by which algorithm; without `debug` nothing could be scored."""
    backend = finished.backend
    algorithm = f", {debug['algorithm']}" if debug else ""
    return f"{model} with {backend.name} on {backend.device}, {backend.dtype}{algorithm}"


def how_much(finished: Finished[object], noun: str, usage: Usage) -> str:
    """Items and tokens, and their time."""
    num_items, num_tokens = count(finished.num_items, noun), count(usage.prompt_tokens, "token")
    return f"{num_items}, {num_tokens} in {finished.run_seconds:.2f} s"


def load_time(finished: Finished[object]) -> str:
    """What a second request in the same process would not wait for."""
    return f"(model loaded in {finished.load_seconds:.1f} s)"


def count(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
