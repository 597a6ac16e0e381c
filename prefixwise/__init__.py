"""prefixwise: score many items against one query with a decoder LLM, each item exactly as if it were alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixwise._version import __version__
from prefixwise.contract.errors import PrefixwiseError

if TYPE_CHECKING:
    from prefixwise.contract.result import ScoreResult
    from prefixwise.scorer import Scorer

__all__ = ["PrefixwiseError", "ScoreResult", "Scorer", "__version__"]


def __getattr__(name: str) -> Any:
    """`Scorer` and `ScoreResult` are imported when they are first used, so that `import prefixwise` costs nothing."""
    if name == "Scorer":
        from prefixwise.scorer import Scorer

        return Scorer
    if name == "ScoreResult":
        from prefixwise.contract.result import ScoreResult

        return ScoreResult
    raise AttributeError(f"module 'prefixwise' has no attribute {name!r}")
