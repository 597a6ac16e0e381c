"""prefixwise: score many items against one query with a decoder LLM, each item exactly as if it were alone."""

from __future__ import annotations

from prefixwise._version import __version__

TYPE_CHECKING = False  # as type checkers know it; `typing` would take most of the time of `import prefixwise`
if TYPE_CHECKING:
    from typing import Any

    from prefixwise.client.async_client import AsyncClient
    from prefixwise.client.client import Client
    from prefixwise.contract.errors import (
        BackendError,
        ClientSettingError,
        DeadlineExceededError,
        ModelLoadError,
        PrefixwiseError,
        PrefixwiseWarning,
        ProfileError,
        QueueFullError,
        RequestError,
        ServiceError,
        TokenizerError,
        UnavailableError,
    )
    from prefixwise.contract.judge_result import Judgement, JudgeResult
    from prefixwise.contract.result import (
        Classification,
        ClassifyResult,
        EmbedResult,
        ItemError,
        RerankedDocument,
        RerankResult,
        ScoredItem,
        ScoreResult,
        Truncation,
        Usage,
    )
    from prefixwise.scorer import Scorer

__all__ = [
    "AsyncClient",
    "BackendError",
    "Classification",
    "ClassifyResult",
    "Client",
    "ClientSettingError",
    "DeadlineExceededError",
    "EmbedResult",
    "ItemError",
    "JudgeResult",
    "Judgement",
    "ModelLoadError",
    "PrefixwiseError",
    "PrefixwiseWarning",
    "ProfileError",
    "QueueFullError",
    "RequestError",
    "RerankResult",
    "RerankedDocument",
    "ScoreResult",
    "ScoredItem",
    "Scorer",
    "ServiceError",
    "TokenizerError",
    "Truncation",
    "UnavailableError",
    "Usage",
    "__version__",
]

_MODULES = {
    "Scorer": "prefixwise.scorer",
    "Client": "prefixwise.client.client",
    "AsyncClient": "prefixwise.client.async_client",
    "JudgeResult": "prefixwise.contract.judge_result",
    "Judgement": "prefixwise.contract.judge_result",
    "PrefixwiseWarning": "prefixwise.contract.errors",
}


def __getattr__(name: str) -> Any:
    """A public name is imported when it is first used, so that `import prefixwise` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'prefixwise' has no attribute {name!r}")
    from importlib import import_module

    is_error = name.endswith("Error") and name != "ItemError"  # which is a part of a result
    home = _MODULES.get(name, "prefixwise.contract.errors" if is_error else "prefixwise.contract.result")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
