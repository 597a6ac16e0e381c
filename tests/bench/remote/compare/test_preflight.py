from __future__ import annotations

from typing import Any

import pytest

from prefixwise._version import __version__
from prefixwise.bench.remote.compare.preflight import CompareSide, check_facts
from prefixwise.bench.remote.remote_agent import RemoteAgent
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from tests.bench.remote.compare_samples import FACTS

LOCAL = RemoteAgent.on(LocalTarget())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"prefixwise": "0.0.1"},
            f"local: expected prefixwise {__version__} as here, got 0.0.1 .prefixwise ops install",
        ),
        ({"packages": {"jax": True}}, "local: torch is not installed for .*: pytorch needs it"),
        ({"is_writable": False}, "local: the folder for artifacts cannot be written"),
        ({}, "local, for pytorch: expected an accelerator 'H200'"),  # JAX sees one, PyTorch does not
    ],
)
def test_what_a_target_lacks_is_said(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        check_facts(CompareSide("pytorch", LOCAL, "H200"), {**FACTS, **facts})
    check_facts(CompareSide("jax", LOCAL, "h200"), FACTS)
