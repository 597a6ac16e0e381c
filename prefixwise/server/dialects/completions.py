"""OpenAI's completions for scoring: log-probabilities of prompts (`/v1/completions`, `echo`), and the one token that
follows a prompt or a chat (`/v1/chat/completions`).

The prompts of a call share their prefixes (`plan/likelihoods.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.checks import check_item_count
from prefixwise.contract.completions import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.contract.result import Usage
from prefixwise.engine.likelihoods import Likelihoods, PreparedLikelihoods, TokenLogprobs
from prefixwise.engine.request_state import RequestState
from prefixwise.prompts.chat import chat_prompt
from prefixwise.prompts.inputs import build_prompts
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import Body, Call, Dialect, Prepared, add_warnings, bounded
from prefixwise.server.service import Service

_TOKEN_BYTES = 96  # of the response's JSON, for a token and its log-probability
_TEXT_BYTES = 16  # for a token in the text
_CHOICE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    """A call with its prompts as tokens. It has one request for each prefix that its prompts have in common."""

    likelihoods: PreparedLikelihoods
    prompts: Ragged
    request: CompletionRequest | ChatRequest

    def max_response_bytes(self, sent_bytes: int) -> int:
        per_token = _TOKEN_BYTES * (self.likelihoods.top_k + 2) + _TEXT_BYTES
        num_tokens = len(self.prompts.flat) + len(self.prompts)
        return num_tokens * per_token + len(self.prompts) * _CHOICE_BYTES + 2 * sent_bytes


class _CompletionDialect(Dialect):
    """What both APIs have in common."""

    def has_text(self, body: Body) -> bool:
        return True  # token ids are decoded, too, and prompts have many

    def _call(
        self,
        service: Service,
        request: CompletionRequest | ChatRequest,
        prompts: Ragged,
        likelihoods: PreparedLikelihoods,
    ) -> Call:
        model = service.names.answer_to(request.model)
        requests = bounded(Prepared(self, {}, model, each, priority=request.priority) for each in likelihoods.requests)
        return CompletionCall(
            dialect=self,
            requests=requests,
            model=model,
            warnings=request.warnings,
            likelihoods=likelihoods,
            prompts=prompts,
            request=request,
        )

    def _response(
        self,
        context: RequestContext,
        call: CompletionCall,
        states: Sequence[RequestState],
        choices: Iterator[Mapping[str, object]],
        num_generated: int,
        kind: tuple[str, str],
    ) -> object:
        add_warnings(context, call.warnings)
        prefix, name = kind
        num_sent, num_cached = len(call.prompts.flat), sum(state.cached_tokens for state in states)
        usage = Usage(num_sent, min(num_sent, num_cached)).to_json()
        usage = {**usage, "completion_tokens": num_generated, "total_tokens": num_sent + num_generated}
        return {
            "id": f"{prefix}-{_id_of(context, call.request)}",
            "object": name,
            "created": int(time.time()),
            "model": call.model,
            "choices": choices,
            "usage": usage,
            **({"warnings": list(call.warnings)} if call.warnings else {}),
        }


class Completions(_CompletionDialect):
    """`/v1/completions`: the tokens of every prompt with `echo`, and the one that follows it with `max_tokens` 1."""

    def prepare_call(self, service: Service, body: Body) -> Call:
        request = parse_completion_request(body)
        check_item_count(len(request.prompt), service.engine.config.max_items_per_request, "prompt")
        engine = service.engine
        prompts = build_prompts(request.prompt, engine.tokenizer, add_special_tokens=request.add_special_tokens)
        likelihoods = Likelihoods(engine).prepare_prompts(
            prompts,
            reads_tokens=request.echo and request.logprobs is not None,
            reads_next=request.max_tokens == 1,
            top_k=request.logprobs or 1,
            model=request.model,
        )
        return self._call(service, request, prompts, likelihoods)

    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        assert isinstance(call, CompletionCall), "`prepare_call` returns one"
        assert isinstance(call.request, CompletionRequest), "`prepare_call` parses one"
        results = Likelihoods(service.engine).finish(call.likelihoods, states)
        tokens = _Tokens(service.engine.tokenizer, as_ids=call.request.return_tokens_as_token_ids)
        request = call.request
        choices = (
            _choice(index, prompt, result, request, tokens)
            for index, (prompt, result) in enumerate(zip(call.prompts, results, strict=True))
        )
        num_generated = request.max_tokens * len(call.prompts)
        return self._response(context, call, states, choices, num_generated, ("cmpl", "text_completion"))


class ChatCompletions(_CompletionDialect):
    """`/v1/chat/completions`: the token that follows a chat, with the log-probabilities of the most likely ones."""

    def prepare_call(self, service: Service, body: Body) -> Call:
        request, engine = parse_chat_request(body), service.engine
        prompts = Ragged.from_sequences([chat_prompt(request.messages, engine.tokenizer)])
        likelihoods = Likelihoods(engine).prepare_prompts(
            prompts,
            reads_tokens=False,
            reads_next=True,
            top_k=request.top_logprobs or 1,
            model=request.model,
        )
        return self._call(service, request, prompts, likelihoods)

    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        assert isinstance(call, CompletionCall), "`prepare_call` returns one"
        assert isinstance(call.request, ChatRequest), "`prepare_call` parses one"
        (result,) = Likelihoods(service.engine).finish(call.likelihoods, states)
        tokens = _Tokens(service.engine.tokenizer, as_ids=call.request.return_tokens_as_token_ids)
        generated = int(result.top_ids[0, 0])
        message = {"role": "assistant", "content": tokens.generated(generated)}
        shown = [tokens.chat_logprob(*each) for each in _top(result, 0, call.request.top_logprobs)]
        first = tokens.chat_logprob(generated, float(result.top_logprobs[0, 0]))
        logprobs = {"content": [{**first, "top_logprobs": shown}]} if call.request.logprobs else None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": "stop" if tokens.is_end(generated) else "length",
        }
        return self._response(context, call, states, iter([choice]), 1, ("chatcmpl", "chat.completion"))


class _Tokens:
    """Shows tokens: by their text, or by their id where that is asked for or the model has no tokenizer."""

    def __init__(self, tokenizer: TextTokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def shown(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def text(self, token_ids: Int32Array) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def generated(self, token_id: int) -> str:
        """The text of the token that follows; special ones have none."""
        is_special = self._tokenizer is None or token_id in self._tokenizer.special_ids
        return "" if is_special or self._tokenizer is None else self._tokenizer.token_text(token_id)

    def is_end(self, token_id: int) -> bool:
        if self._tokenizer is None:
            return False
        end = self._tokenizer.special_tokens.get("eos_token")
        return end is not None and token_id == self._tokenizer.token_id(end)

    def lens(self, token_ids: Int32Array) -> NDArray[np.int64]:
        """Characters of each token in the text."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return np.zeros(len(token_ids), np.int64)
        return np.array([len(tokenizer.token_text(each)) for each in token_ids.tolist()], np.int64)

    def chat_logprob(self, token_id: int, logprob: float) -> dict[str, object]:
        text = self.shown(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _choice(
    index: int, prompt: Int32Array, result: TokenLogprobs, request: CompletionRequest, tokens: _Tokens
) -> dict[str, object]:
    generated = result.top_ids[-1:, 0] if request.max_tokens else prompt[:0]
    text = tokens.text(prompt) if request.echo else ""
    text += "".join(tokens.generated(each) for each in generated.tolist())
    is_end = any(tokens.is_end(each) for each in generated.tolist())
    logprobs = None if request.logprobs is None else _logprobs(prompt, generated, result, request, tokens)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "stop" if is_end else "length"}


def _logprobs(
    prompt: Int32Array, generated: Int32Array, result: TokenLogprobs, request: CompletionRequest, tokens: _Tokens
) -> dict[str, object]:
    """The lists of OpenAI's `logprobs`. No token comes before the first one of a prompt, so it has none."""
    shown_ids = np.concatenate([prompt, generated]) if request.echo else generated
    logprobs: list[float | None] = result.logprobs.tolist()
    if len(generated):  # the plan reads a token there that nobody has asked for
        logprobs[-1] = float(result.top_logprobs[-1, 0])
    tops: list[dict[str, float] | None] = [
        _top_by_text(result, row, request.logprobs or 0, token, logprob, tokens)
        for row, (token, logprob) in enumerate(
            zip(shown_ids[len(shown_ids) - len(logprobs) :].tolist(), logprobs, strict=True)
        )
    ]
    lens = tokens.lens(shown_ids)
    has_first: list[None] = [None] if request.echo else []
    return {
        "tokens": [tokens.shown(each) for each in shown_ids.tolist()],
        "token_logprobs": [*has_first, *logprobs],
        "top_logprobs": [*has_first, *tops],
        "text_offset": (np.cumsum(lens) - lens).tolist(),
    }


def _top(result: TokenLogprobs, row: int, top_k: int) -> list[tuple[int, float]]:
    """The most likely tokens at a position, best first."""
    ids, logprobs = result.top_ids[row, :top_k].tolist(), result.top_logprobs[row, :top_k].tolist()
    return list(zip(ids, logprobs, strict=True))


def _top_by_text(
    result: TokenLogprobs, row: int, top_k: int, token: int, logprob: float | None, tokens: _Tokens
) -> dict[str, float]:
    """The most likely tokens and the one that is there. Of tokens with the same text the most likely one counts."""
    found: dict[str, float] = {}
    for each, value in (*_top(result, row, top_k), (token, logprob)):
        if value is not None:
            found.setdefault(tokens.shown(each), value)
    return found


def _id_of(context: RequestContext, request: CompletionRequest | ChatRequest) -> str:
    """The header's id comes first."""
    is_own = b"x-request-id" in context.headers or request.request_id is None
    return context.id if is_own or request.request_id is None else request.request_id
