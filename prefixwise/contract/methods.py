"""The methods that `Scorer` and `Client` share: one signature and one docstring for both."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, overload

from prefixwise.contract.classify import CLASSIFY_FIELDS, ClassifyOptions, EmbedOptions
from prefixwise.contract.errors import PrefixwiseWarning
from prefixwise.contract.fields import with_fields
from prefixwise.contract.judge import JUDGE_FIELDS, JudgeOptions
from prefixwise.contract.judge_result import JudgeResult
from prefixwise.contract.request import SCORE_FIELDS, OnItemError, ScoreOptions, TextOrIds, TokenIds
from prefixwise.contract.rerank_request import RerankOptions, rerank_fields
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult, truncation_warnings

Body = dict[str, object]
OnProgress = Callable[[int, int], None]  # items done, items in all
Inputs = str | TokenIds | Iterable[str] | Iterable[TokenIds]
Documents = Iterable[str] | Iterable[Mapping[str, object]]
Messages = Iterable[Mapping[str, object]]
Answers = str | Iterable[str] | Iterable[int]
Result = TypeVar("Result", ScoreResult[Any, Any], RerankResult, ClassifyResult, JudgeResult)


class ScoringMethods(ABC):
    """Scores items, reranks documents, judges items, classifies and embeds inputs."""

    @abstractmethod
    def _score(self, body: Body, on_progress: OnProgress | None) -> ScoreResult: ...
    @abstractmethod
    def _rerank(self, body: Body, on_progress: OnProgress | None) -> RerankResult: ...
    @abstractmethod
    def _judge(self, body: Body, on_progress: OnProgress | None) -> JudgeResult: ...
    @abstractmethod
    def _classify(self, body: Body, on_progress: OnProgress | None) -> ClassifyResult: ...
    @abstractmethod
    def _embed(self, body: Body, on_progress: OnProgress | None) -> EmbedResult: ...

    @overload
    def score(
        self,
        query: str,
        items: Iterable[str],
        *,
        on_item_error: Literal["fail"] = "fail",
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[str, list[float]]: ...
    @overload
    def score(
        self,
        query: TokenIds,
        items: Iterable[TokenIds],
        *,
        on_item_error: Literal["fail"] = "fail",
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[list[int], list[float]]: ...
    @overload
    def score(
        self,
        query: str,
        items: Iterable[str],
        *,
        on_item_error: Literal["report"],
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[str]: ...
    @overload
    def score(
        self,
        query: TokenIds,
        items: Iterable[TokenIds],
        *,
        on_item_error: Literal["report"],
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[list[int]]: ...
    @with_fields(SCORE_FIELDS, ScoreOptions)
    def score(
        self,
        query: TextOrIds,
        items: Iterable[str] | Iterable[TokenIds],
        *,
        on_item_error: OnItemError = "fail",
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[Any, Any]:
        """Score the labels after each item: the same request as `POST /v1/score`.

        Items may be any ordered iterable: a list, a generator, a NumPy array, a column of a DataFrame.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called with the number of scored items, and with the number of all items. A client calls
                it once, when the response is there.

        Returns:
            The scores, in the order of the items. `ranked()` has the best first.

        Raises:
            RequestError: The request is wrong, or cannot be scored. Its `code` and `param` say what is.
            TokenizerError: The request has text, and the model has no tokenizer.

        Examples:
            >>> result = scorer.score(
            ...     "Review: ",
            ...     ["It broke after two days.", "Wonderful service, friendly people."],
            ...     suffix=" Sentiment:",
            ...     labels=[" positive", " negative"],
            ...     apply_softmax=True,
            ... )
            >>> result.ranked()[0].item
            'Wonderful service, friendly people.'
            >>> [round(score, 2) for score in result[1].scores]
            [1.0, 0.0]
        """
        body = {"query": query, "items": items, "on_item_error": on_item_error, **adapter_body(lora), **options}
        return warned(self._score(body, on_progress))

    @with_fields(rerank_fields("native"), RerankOptions)
    def rerank(
        self,
        query: str,
        documents: Documents,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[RerankOptions],
    ) -> RerankResult:
        """Order documents by their relevance to the query, with the prompt of the model's profile.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called with the number of scored documents, and with the number of all documents. A client
                calls it once, when the response is there.

        Returns:
            The documents, best first.

        Raises:
            RequestError: The request is wrong, or cannot be scored. Its `code` and `param` say what is.
            TokenizerError: The model has no tokenizer.

        Examples:
            >>> result = scorer.rerank(
            ...     "When does the train to Berlin leave?",
            ...     ["Trains are a safe way to travel.", "The train to Berlin leaves at 10:15 from platform 4."],
            ...     profile="chat-yes-no",
            ... )
            >>> result[0].document
            'The train to Berlin leaves at 10:15 from platform 4.'
        """
        body = {"query": query, "documents": documents, **adapter_body(lora), **options}
        return warned(self._rerank(body, on_progress))

    @with_fields(JUDGE_FIELDS, JudgeOptions)
    def judge(
        self,
        messages: Messages,
        items: Iterable[str] | None = None,
        *,
        answers: Answers,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[JudgeOptions],
    ) -> JudgeResult:
        """Judge items by a rubric, or one chat: how likely is each answer? The same request as `POST /v1/judge`.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called with the number of judged items, and with the number of all items. A client calls
                it once, when the response is there.

        Returns:
            For each item, in their order: the distribution over the answers, the most likely one, the expected value
            of a scale of numbers, and the entropy.

        Raises:
            RequestError: The request is wrong, or the model has no chat template. Its `code` and `param` say what is.
            TokenizerError: The model has no tokenizer.

        Examples:
            >>> rubric = "Is the city in France? Answer yes or no.\\n\\nCity: {item}"
            >>> result = scorer.judge([{"role": "user", "content": rubric}], ["Paris", "Tokyo"], answers="yes/no")
            >>> result.answers, len(result[0].probs)
            (('yes', 'no'), 2)
            >>> result[0].probs[0] > result[1].probs[0]
            True
        """
        body = {"messages": messages, "items": items, "answers": answers, **adapter_body(lora), **options}
        return warned(self._judge(body, on_progress))

    @with_fields(CLASSIFY_FIELDS[1:], ClassifyOptions)
    def classify(
        self,
        inputs: Inputs,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResult:
        """Classify whole inputs with a classifier's head: the same request as `POST /classify`.

        `score` without labels gives the logits of items behind a shared query.

        Args:
            inputs: One text, several, or the token ids of either.
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called with the number of classified inputs, and with the number of all inputs. A client
                calls it once, when the response is there.

        Returns:
            The label and the numbers of all classes for every input.

        Raises:
            RequestError: The request is wrong, or the model is not a classifier.
            TokenizerError: The request has text, and the model has no tokenizer.

        Examples:
            >>> result = classifier.classify([[5, 6, 7], [8, 9]])  # token ids; texts are tokenized
            >>> len(result), len(result[0].probs) == len(result.labels)
            (2, True)
        """
        return warned(self._classify({"input": inputs, **adapter_body(lora), **options}, on_progress))

    @with_fields(CLASSIFY_FIELDS[2:], EmbedOptions)
    def embed(
        self,
        inputs: Inputs,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """The hidden state after the last token of each input, after the final norm; any model has it.

        `score` with return_pooled_hidden_states gives those of items behind a shared query.

        Args:
            inputs: One text, several, or the token ids of either.
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called with the number of embedded inputs, and with the number of all inputs. A client
                calls it once, when the response is there.

        Returns:
            An array of one row for each input.

        Raises:
            RequestError: The request is wrong.
            TokenizerError: The request has text, and the model has no tokenizer.

        Examples:
            >>> scorer.embed(["I loved it.", "It broke."]).embeddings.shape
            (2, 576)
        """
        return self._embed({"input": inputs, **adapter_body(lora), **options}, on_progress)


def adapter_body(lora: str | None) -> Body:
    """A request names an adapter as its model."""
    return {} if lora is None else {"model": lora}


def warned(result: Result) -> Result:
    """The result, whose warnings are also Python's. Documents that were cut are one of them."""
    if isinstance(result, RerankResult):
        result = replace(result, warnings=(*result.warnings, *truncation_warnings(result.truncated)))
    for warning in result.warnings:
        warnings.warn(warning, PrefixwiseWarning, stacklevel=_caller_level())
    return result


def _caller_level() -> int:
    """The stack level, as `warned` counts, of the first frame outside of this package and of asyncio."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("prefixwise", "asyncio"):
        frame, level = frame.f_back, level + 1
    return level
