"""The model `prefixwise` of lm-evaluation-harness: `prefixwise lm-eval`, or `import prefixwise.lm_eval` in Python.

    requests of lm_eval -> tokens, as its model `hf` makes them -> TokenSequence -> engine/likelihoods.py

Importing this module registers the model. It needs lm_eval, and nothing else of the package imports it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

import lm_eval.models  # noqa: F401  # registers lm_eval's own models, which it does only in an empty registry
import numpy as np
from jinja2 import TemplateError
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from prefixwise._version import __version__
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, TokenizerError
from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.likelihoods import Likelihoods
from prefixwise.forward.backend import Warmup
from prefixwise.launch.loading import load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.models.chat_template import compile_chat_template
from prefixwise.plan.likelihoods import TokenSequence
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

_CALL_TOKENS = 1 << 20  # that the engine gets at once; then lm_eval's cache of answers has them
_ENCODED_CHARS = 1 << 20  # at once, or one text
_DEFAULT_DEVICE = "cuda:0"  # that lm_eval's program passes where `--device` is not given, on any machine
_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers marks the end of the last message
_UNUSED = {  # lm_eval's own options, and the values that it passes if nobody asks for them
    "batch_size": (1, "the engine fills its forwards by itself"),
    "max_batch_size": (None, "the engine fills its forwards by itself"),
    "trust_remote_code": (None, "no code of a checkpoint is run"),
}

Answer = tuple[float, bool]  # log-likelihood, and whether greedy decoding would write the continuation
Tokens = Sequence[int] | Int32Array
Pair = tuple[tuple[str, str] | None, Tokens, Tokens]  # texts for the cache of answers; context, continuation


class Instance(Protocol):
    """A request of lm_eval."""

    args: tuple[Any, ...]
    task_name: str | None


@register_model("prefixwise")
class PrefixwiseLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """Log-likelihoods of a checkpoint. Contexts that begin alike are computed once.

    Args:
        pretrained: A folder, a `.gguf` file or a hub id; None is the embedded model.
        backend: As of `Scorer`, like `device`, `dtype`, `tp_size`, `dp_size`, `warmup` and `prefix_cache_bytes`.
        max_length: Most tokens of context and continuation; contexts are cut from the left. None: all that fit.
        add_bos_token: Whether texts begin with BOS; None: as the tokenizer does it.
        prefix_token_id: The token before an empty context; None: BOS, or EOS if there is none.
        enable_thinking: Of the chat template; None: its default.
        batch_size: Not used; nor are `max_batch_size` and `trust_remote_code`.
        unknown: Any other argument is refused.

    Raises:
        PrefixwiseError: An argument is wrong, or the checkpoint cannot be used.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        tp_size: int = 1,
        dp_size: int = 1,
        warmup: Warmup = "none",
        prefix_cache_bytes: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        trust_remote_code: bool | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        _refuse_unknown(unknown)
        _check(
            add_bos_token is None or isinstance(add_bos_token, bool), "add_bos_token", "True or False", add_bos_token
        )
        _check(enable_thinking in (None, False), "enable_thinking", "False, as nothing is generated", enable_thinking)
        _report_unused(batch_size=batch_size, max_batch_size=max_batch_size, trust_remote_code=trust_remote_code)
        options = EngineOptions(
            model=None if pretrained is None else str(pretrained),
            backend=backend,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            dp_size=dp_size,
            warmup=warmup,
            prefix_cache_bytes=prefix_cache_bytes,
            max_queued_tokens=sys.maxsize,
        )
        self.engine = load_engine(options)
        self.close = weakref.finalize(self, self.engine.close)
        self._likelihoods = Likelihoods(self.engine)
        self._device = self.engine.backend.info.device
        self.tokenizer = _tokenizer_of(self.engine.tokenizer)
        self._tokenizer_name = str(options.model or self.engine.config.model_name).replace("/", "__")
        self.max_length = _max_length(max_length, self.engine.backend.config.max_context_len)
        self._prefix_token_id = _prefix_token_id(prefix_token_id, self.tokenizer)
        self._prefix_text = self.tokenizer.decode_token(self._prefix_token_id)
        self._adds_special_tokens = add_bos_token is not False
        self._leading_ids = _leading_ids(self.tokenizer, add_bos_token)
        self._template_args = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template: Any = None  # of chats, compiled on first use
        self._token_ids: dict[str, Int32Array] = {}  # of texts that are encoded ahead

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> PrefixwiseLM:
        """`arg_dict`: lm_eval's `--model_args`. `additional_config`: its other options; None is not given."""
        others = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if others.get("device") == _DEFAULT_DEVICE:
            del others["device"]
        for name in others.keys() & arg_dict.keys():
            message = f"{name} must be given once, got {others[name]!r} and {arg_dict[name]!r} in model_args"
            raise InvalidValueError(message, code="conflicting_parameters", param=name)
        return cls(**arg_dict, **others)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> PrefixwiseLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        eos = _special_id(self.tokenizer, "eos_token")
        return self._prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer_name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """As lm_eval's model `hf`. None: with special tokens, unless the text has them."""
        found: list[int] = self._encode(string, add_special_tokens).tolist()
        return found

    def _encode(self, text: str, add_special_tokens: bool | None = None) -> Int32Array:
        if add_special_tokens is None:
            add_special_tokens = self._adds_special_tokens and not text.startswith(self._prefix_text)
        known = self._token_ids.get(text)
        ids = self.tokenizer.encode(text) if known is None else known
        if not add_special_tokens:
            return ids
        return np.concatenate([np.array(self._leading_ids, np.int32), ids, self.tokenizer.trailing_ids])

    def _encode_pair(self, context: str, continuation: str) -> tuple[Int32Array, Int32Array]:
        """As lm_eval's, without lists: the tokens of both, where spaces between them belong to the continuation."""
        stripped = context.rstrip()
        whole, before = self._encode(context + continuation), self._encode(stripped)
        return before, whole[len(before) :]

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """As lm_eval's, which encodes texts one by one: here each is encoded once, all together and on all cores."""
        try:
            self._token_ids = self._encode_ahead([request.args for request in requests])
            answers: list[Answer] = super().loglikelihood(requests, disable_tqdm)
            return answers
        finally:
            self._token_ids = {}

    def _encode_ahead(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Int32Array]:
        """The tokens of contexts, without the spaces at their ends, and of contexts with continuations."""
        contexts = (context.rstrip() for context, _ in pairs)
        wholes = (context + continuation for context, continuation in pairs)
        texts = [text for text in dict.fromkeys((*contexts, *wholes)) if text]
        found: dict[str, Int32Array] = {}
        part, size = list[str](), 0
        for text in texts:
            part.append(text)
            size += len(text)
            if size >= _ENCODED_CHARS or len(found) + len(part) == len(texts):
                found.update(zip(part, self.tokenizer.encode_many(part), strict=True))
                part, size = [], 0
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: object) -> list[Answer]:
        sequences = [self._sequence(context, continuation) for _, context, continuation in requests]
        answers: list[Answer] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for numbers in _calls(sequences):
                first = bar.n

                def show(num_read: int, num_tokens: int, first: int = first, count: int = len(numbers)) -> None:
                    bar.update(first + count * num_read // num_tokens - bar.n)

                found = self._likelihoods.read([sequences[number] for number in numbers], on_progress=show)
                for number, logprobs in zip(numbers, found, strict=True):
                    answers[number] = logprobs.total, logprobs.is_all_greedy
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return answers

    def _sequence(self, context: Tokens, continuation: Tokens) -> TokenSequence:
        """Cut from the left, as `hf` does it: the last token is read and not computed."""
        if not 0 < len(continuation) <= self.max_length or not len(context):
            raise InvalidValueError(
                f"a request must have a context and a continuation of 1 to {self.max_length} tokens (max_length), got "
                f"{len(context)} and {len(continuation)} tokens",
                code="context_too_long" if len(context) and len(continuation) else "empty_continuation",
            )
        token_ids = np.concatenate([context, continuation])[-self.max_length - 1 :].astype(np.int32)
        num_cut = len(context) + len(continuation) - len(token_ids)
        if num_cut:
            log.warning("%d tokens were cut off the beginning of a context: max_length is %d", num_cut, self.max_length)
        return TokenSequence(token_ids, len(token_ids) - len(continuation))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of `max_length` tokens."""
        windows = [self._windows(request.args[0]) for request in requests]
        found = iter(self._loglikelihood_tokens([each for of_text in windows for each in of_text], disable_tqdm))
        totals = [sum(next(found)[0] for _ in of_text) for of_text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[Pair]:
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in rolling]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Raises InvalidRequestError."""
        tasks = ", ".join(sorted({request.task_name or "a task without a name" for request in requests}))
        message = f"prefixwise computes log-likelihoods and generates no text, which these tasks ask for: {tasks}"
        raise InvalidRequestError(message, code="no_generation")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """As `hf`: without messages of the system where the template does not take them."""
        if self._template is None:
            if self.tokenizer.chat_template is None:
                raise InvalidRequestError("this model has no chat template to apply", code="no_chat_template")
            self._template = compile_chat_template(self.tokenizer.chat_template)
        try:
            return self._render(chat_history, add_generation_prompt)
        except TemplateError as error:
            log.warning("the chat template fails, so messages of the system are left out: %s", error)
            others = [message for message in chat_history if message["role"] != "system"]
            return self._render(others, add_generation_prompt)

    def _render(self, messages: Sequence[Mapping[str, str]], is_answered: bool) -> str:
        """`is_answered`: an answer follows; else the last message goes on."""
        if not is_answered:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_TAG}]
        variables = {"messages": messages, "add_generation_prompt": is_answered, "tools": None, "documents": None}
        text: str = self._template.render(**variables, **self.tokenizer.special_tokens, **self._template_args)
        if is_answered:
            return text
        before, tag, after = text.rpartition(_END_TAG.strip())
        if not tag:
            raise InvalidRequestError("the chat template leaves the last message out", code="invalid_messages")
        return before if after.startswith(" ") else before.rstrip()

    def get_model_info(self) -> dict[str, str]:
        """For lm_eval's file of results."""
        info = self.engine.backend.info
        return {
            "prefixwise_version": __version__,
            "model_backend": info.name,
            "model_device": info.device_kind,
            "model_dtype": info.dtype,
        }


def run_program(arguments: Sequence[str]) -> None:
    """lm_eval's own program, which knows our model now."""
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


def _calls(sequences: Sequence[TokenSequence]) -> Iterator[list[int]]:
    """Numbers of sequences, in the order of their tokens, so that those that begin alike come together."""
    numbers: list[int] = []
    num_tokens = 0
    for number in sorted(range(len(sequences)), key=lambda each: sequences[each].token_ids.astype(">i4").tobytes()):
        if numbers and num_tokens + len(sequences[number].token_ids) > _CALL_TOKENS:
            yield numbers
            numbers, num_tokens = [], 0
        numbers.append(number)
        num_tokens += len(sequences[number].token_ids)
    if numbers:
        yield numbers


# Arguments


def _check(is_legal: bool, name: str, expected: str, got: object) -> None:
    if not is_legal:
        raise InvalidValueError(f"{name} must be {expected}, got {got!r}", code=f"invalid_{name}", param=name)


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    if not unknown:
        return
    known = [name for name in signature(PrefixwiseLM).parameters if name not in (*_UNUSED, "unknown")]
    message = f"unknown model_args: {', '.join(unknown)}; expected {', '.join(known)}"
    raise InvalidValueError(message, code="unknown_model_args")


def _report_unused(**given: object) -> None:
    for name, value in given.items():
        default, why = _UNUSED[name]
        if value not in (default, None):
            log.warning("%s=%s is not used: %s", name, value, why)


def _max_length(asked: int | None, longest: int) -> int:
    is_legal = asked is None or (isinstance(asked, int) and 1 <= asked <= longest)
    _check(is_legal, "max_length", f"a whole number from 1 to {longest}, the model's context", asked)
    return asked or longest


def _tokenizer_of(tokenizer: TextTokenizer | None) -> TextTokenizer:
    if tokenizer is None:
        raise TokenizerError("the checkpoint has no tokenizer, and lm_eval's tasks are text")
    return tokenizer


def _special_id(tokenizer: TextTokenizer, role: str) -> int | None:
    token = tokenizer.special_tokens.get(role)
    return None if token is None else tokenizer.token_id(token)


def _prefix_token_id(asked: int | None, tokenizer: TextTokenizer) -> int:
    found = (asked, _special_id(tokenizer, "bos_token"), _special_id(tokenizer, "eos_token"))
    known = [each for each in found if each is not None]
    if not known:
        message = "the tokenizer has neither BOS nor EOS, so model_args must have prefix_token_id"
        raise InvalidValueError(message, code="missing_prefix_token_id", param="prefix_token_id")
    return known[0]


def _leading_ids(tokenizer: TextTokenizer, add_bos_token: bool | None) -> list[int]:
    """The special tokens before a text."""
    leading: list[int] = tokenizer.leading_ids.tolist()
    if not add_bos_token or leading:
        return leading
    bos = _special_id(tokenizer, "bos_token")
    _check(bos is not None, "add_bos_token", "False or None for a tokenizer without BOS", add_bos_token)
    return [] if bos is None else [bos]
