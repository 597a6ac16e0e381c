"""The group `cluster`: `serve` and `config`, with the options of `prefixwise serve` and those of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from prefixwise.cli.cluster.config import config
from prefixwise.cli.cluster.options import CLUSTER_PANEL, CLUSTER_SERVER_FLAGS, SCALE_FLAGS
from prefixwise.cli.cluster.serve import serve
from prefixwise.cli.flags import with_flags
from prefixwise.cli.serve_options import ENGINE_PANEL, SERVE_ENGINE_FLAGS, SERVER_PANEL, first_spelling
from prefixwise.cluster.options import ScaleOptions
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

cluster = typer.Typer()


def _with_all_options(verb: Callable[..., None]) -> Callable[..., Any]:
    verb = with_flags("engine", EngineOptions, SERVE_ENGINE_FLAGS, panel=ENGINE_PANEL, warmup="full")(verb)
    verb = with_flags("server", ServerOptions, CLUSTER_SERVER_FLAGS, panel=SERVER_PANEL)(verb)
    return with_flags("scale", ScaleOptions, SCALE_FLAGS, panel=CLUSTER_PANEL)(verb)


for _name, _verb in {"serve": serve, "config": config}.items():
    cluster.command(_name, context_settings={"token_normalize_func": first_spelling})(_with_all_options(_verb))
