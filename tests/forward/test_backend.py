"""What every backend owes the engine."""

from __future__ import annotations

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import Layout


def test_a_backend_must_have_a_start() -> None:
    with pytest.raises(TypeError, match="start"):
        Backend()  # type: ignore[abstract]


def test_a_backend_that_holds_nothing_can_be_closed() -> None:
    backend = FakeBackend()
    backend.close()
    backend.close()


def test_layouts_have_the_names_of_the_design() -> None:
    assert [str(layout) for layout in Layout] == ["causal", "packed", "extend"]
