"""itemwise: score many items against one query with a decoder LLM, each item exactly as if it were alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from itemwise._version import __version__
from itemwise.contract.errors import ItemwiseError

if TYPE_CHECKING:
    from itemwise.contract.result import ScoreResult
    from itemwise.scorer import Scorer

__all__ = ["ItemwiseError", "ScoreResult", "Scorer", "__version__"]


def __getattr__(name: str) -> Any:
    """`Scorer` and `ScoreResult` are imported when they are first used, so that `import itemwise` costs nothing."""
    if name == "Scorer":
        from itemwise.scorer import Scorer

        return Scorer
    if name == "ScoreResult":
        from itemwise.contract.result import ScoreResult

        return ScoreResult
    raise AttributeError(f"module 'itemwise' has no attribute {name!r}")
