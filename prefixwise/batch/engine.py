"""The engine of a worker."""

from __future__ import annotations

import sys
from dataclasses import replace

from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.warmup import OnProgram
from prefixwise.launch.loading import load_engine
from prefixwise.launch.options import EngineOptions


def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """A row may have any number of items; how many tokens wait is bounded, for the worker waits, too."""
    return load_engine(replace(options, max_items_per_request=sys.maxsize), on_program)
