"""The options of `prefixwise serve`: the engine's in SGLang's spelling, and the server's own.

Our own spellings (`prefixwise score` has them) are understood too: SECOND_SPELLINGS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, get_args

import typer

from prefixwise.cli.engine_options import ENGINE_FLAGS, PROFILE_FLAG
from prefixwise.cli.flags import Flag
from prefixwise.contract.request import Algorithm
from prefixwise.server.config import LogLevel

ENGINE_PANEL = "Model and engine"
SERVER_PANEL = "Server"

# The origin's spelling of a field, which its runbooks use.
_ORIGIN_NAMES = {
    "model": "--model-path",
    "attention": "--attention-backend",
    "chunk_size": "--multi-item-scoring-chunk-size",
    "mask": "--multi-item-mask-impl",
    "segment_fallback_threshold": "--multi-item-segment-fallback-threshold",
    "delimiter_token_id": "--multi-item-scoring-delimiter",
}
SECOND_SPELLINGS = {f"--{field.replace('_', '-')}": name for field, name in _ORIGIN_NAMES.items()}

# Other servers call these types so.
DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
_DtypeName = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]


def first_spelling(token: str) -> str:
    """How typer knows an option, without its dashes; every other word is itself."""
    return SECOND_SPELLINGS.get(f"--{token}", f"--{token}").removeprefix("--")


def _renamed(field: str, flag: Flag) -> Flag:
    name = _ORIGIN_NAMES.get(field)
    if name is None:
        return flag
    return replace(flag, name=name, help=f"{flag.help} Also --{field.replace('_', '-')}.")


SERVE_ENGINE_FLAGS = {
    **{field: _renamed(field, flag) for field, flag in ENGINE_FLAGS.items()},
    "dtype": replace(ENGINE_FLAGS["dtype"], kind=_DtypeName),
    "profile": PROFILE_FLAG,
    "algorithm": Flag(
        Algorithm,
        f"How items share their prefix, where a request leaves it open: {', '.join(get_args(Algorithm))}.",
        "NAME",
    ),
    "prefix_cache": Flag(bool, "Keep no prefix between requests.", "", name="--disable-radix-cache", turns_off=True),
    "chunked_prefill_size": Flag(
        int | None, "Most tokens of one request's prefix in one step; -1: no bound of its own.", least=-1
    ),
    "max_queued_tokens": Flag(
        int | None, "Most tokens that may wait; more are refused (429). Chosen for the device.", least=1
    ),
    "max_items_per_request": Flag(int, "Most items of one request.", least=1),
    "served_names": Flag(
        str,
        "What requests may call the model; may be repeated, and the first is what answers say. "
        "The path as given and its base name match too.",
        "NAME",
        name="--served-model-name",
        repeatable=True,
    ),
}

SERVER_FLAGS = {
    "host": Flag(str, "The address to listen on; 0.0.0.0: every one of this machine.", "ADDRESS"),
    "port": Flag(int, "The port to listen on; 0: any that is free.", least=0),
    "api_key": Flag(
        str | None,
        "What requests must carry as their bearer token; nothing when left out.",
        "KEY",
        environment_variable="PREFIXWISE_API_KEY",
    ),
    "cors_origins": Flag(
        str,
        "A web page's origin that may send requests, or *; may be repeated.",
        "ORIGIN",
        name="--cors-origin",
        repeatable=True,
    ),
    "max_request_bytes": Flag(int, "Largest body of a request.", least=1),
    "request_timeout": Flag(
        float, "Seconds from a request's arrival to its answer, then 504; 0: no limit.", "SECONDS", least=0
    ),
    "shutdown_grace": Flag(float, "Seconds that requests in flight get on shutdown.", "SECONDS", least=0),
    "strict_model": Flag(bool, "Rerank routes, too, refuse requests for a model that is not served.", ""),
    "reports_dir": Flag(str | None, "A folder of artifacts of the harness, which /reports lists and shows.", "DIR"),
    "log_level": Flag(LogLevel, f"How much to log on stderr: {', '.join(get_args(LogLevel))}.", "NAME"),
    "log_json": Flag(bool, "One JSON object per line of the log.", ""),
}

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        metavar="",
        help="Accepted, and without effect: no code from a checkpoint is ever run.",
        rich_help_panel=ENGINE_PANEL,
    ),
]
