"""The front door for Python users: `Scorer(model).score(query, items, labels=...)`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from prefixwise.contract.classify import parse_classify_request, parse_embed_request
from prefixwise.contract.errors import InvalidValueError, ModelNotFoundError, describe, quote
from prefixwise.contract.judge import parse_judge_request
from prefixwise.contract.judge_result import JudgeResult
from prefixwise.contract.methods import Body, OnProgress, ScoringMethods
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.contract.request import Algorithm
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.judge import Judge
from prefixwise.engine.reranker import Reranker
from prefixwise.forward.backend import Warmup
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.algorithms import MaskOption


class Scorer(ScoringMethods):
    """A model, loaded once. Use it as a context manager, or call `close()`. Any number of threads may use it.

    Args:
        model: A folder in Hugging Face's layout, a `.gguf` file or a hub id; None is the embedded model,
            SmolLM2-135M-Instruct.
        backend: `auto`, `jax` or `torch`.
        device: `auto`, `cpu`, `cuda`, `gpu`, `tpu`, or one of them with a number, like `cuda:1`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        tp_size: Tensor parallelism: devices that share every layer.
        dp_size: Data parallelism: copies of the model.
        batch_invariant: The same bits at every batch size; None: where that costs nothing (CPUs, GPUs in half
            precision).
        quantization: "fp8": linear layers in FP8, quantised while they are loaded (NVIDIA GPUs).
        kv_cache_dtype: `auto`, or `fp8` (`fp8_e4m3`): the KV cache in FP8, which holds twice as many prefixes (PyTorch
            on GPUs).
        prefix_attention_dtype: `auto`, or `fp8`: queries and the keys of prefixes are multiplied in FP8 (PyTorch on
            GPUs).
        attention: The name of an implementation; None is the best that runs.
        warmup: `none`, `fast` or `full`: which programs are compiled before the first request.
        compilation_cache_dir: For compiled programs of JAX; None is the user's cache folder, on accelerators.
        weight_cache: Cache dequantised weights on disk, in the user's cache folder, for the next start.
        prefix_cache_bytes: The KV cache on each device; None is chosen for the device.
        prefix_cache: Cache prefixes between requests.
        chunked_prefill_size: Most tokens of one request's prefix in a step; None is no bound.
        algorithm: What `auto` in a request means.
        mask: Of packed sequences: `auto`, `segment` or `dense`.
        segment_fallback_threshold: With mask `auto`, packed sequences up to this length have the mask `segment`.
        chunk_size: Most items in a packed sequence or a forward; 0 is no bound, None follows from the model.
        token_budget: Most tokens in one forward; None is the device's default.
        delimiter_token_id: A token between the query and every item; None is no token.
        max_items_per_request: More items are an error.
        profile: How `rerank` makes prompts of documents: a name or a `.toml` file; None goes by the model's name.
        lora: LoRA adapters, folders that `peft` has saved, by the names that requests have for them in `lora`.
        max_loras: How many adapters fit at a time; None: as many as `lora` has.
        max_lora_rank: The largest rank, up to 64; None: the largest of `lora`, and at least 16.
        on_program: Is called for each program that is compiled.

    Raises:
        ModelLoadError: The checkpoint does not exist or cannot be used.
        BackendError: The backend, the device or the dtype is not available.
        ProfileError: The profile does not exist, is not valid, or does not fit the model.
        RequestError: Another option is wrong.

    Examples:
        >>> with Scorer(dtype="float32") as scorer:
        ...     result = scorer.score("The capital of France:", [""], labels=[" Paris", " Berlin"], score_mode="logit")
        >>> result.scores[0][0] > result.scores[0][1]
        True
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        tp_size: int = 1,
        dp_size: int = 1,
        batch_invariant: bool | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        prefix_attention_dtype: str = "auto",
        attention: str | None = None,
        warmup: Warmup = "none",
        compilation_cache_dir: str | Path | None = None,
        weight_cache: bool = True,
        prefix_cache_bytes: int | None = None,
        prefix_cache: bool = True,
        chunked_prefill_size: int | None = None,
        algorithm: Algorithm = "auto",
        mask: MaskOption = "auto",
        segment_fallback_threshold: int = 32_768,
        chunk_size: int | None = None,
        token_budget: int | None = None,
        delimiter_token_id: int | None = None,
        max_items_per_request: int = 100_000,
        profile: str | Path | None = None,
        lora: Mapping[str, str | Path] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        on_program: OnProgram | None = None,
    ) -> None:
        _check(lora is None or isinstance(lora, Mapping), "lora", "a mapping of names to folders, or None", lora)
        _check(on_program is None or callable(on_program), "on_program", "a function or None", on_program)
        options = EngineOptions(
            model=model,
            backend=backend,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            dp_size=dp_size,
            batch_invariant=batch_invariant,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            prefix_attention_dtype=prefix_attention_dtype,
            attention=attention,
            warmup=warmup,
            compilation_cache_dir=compilation_cache_dir,
            weight_cache=weight_cache,
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache=prefix_cache,
            chunked_prefill_size=chunked_prefill_size,
            max_queued_tokens=sys.maxsize,  # a bound of the queue protects servers, not a process from itself
            algorithm=algorithm,
            mask=mask,
            segment_fallback_threshold=segment_fallback_threshold,
            chunk_size=chunk_size,
            token_budget=token_budget,
            delimiter_token_id=delimiter_token_id,
            max_items_per_request=max_items_per_request,
            profile=profile,
            lora=tuple(f"{name}={folder}" for name, folder in (lora or {}).items()),
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
        )
        self.engine = load_engine(options, on_program)
        self.reranker = Reranker(self.engine)
        self.classifier = Classifier(self.engine)
        weakref.finalize(self, self.engine.close)  # frees the model of a scorer that nobody closed

    def __repr__(self) -> str:
        info = self.engine.backend.info
        return f"Scorer({self.engine.config.model_name!r}, backend={info.name!r}, device={info.device!r})"

    def _score(self, body: Body, on_progress: OnProgress | None) -> ScoreResult:
        return self.engine.score(parse_score_request(self._checked(body)), on_progress)

    def _rerank(self, body: Body, on_progress: OnProgress | None) -> RerankResult:
        return self.reranker.rerank(parse_rerank_request(self._checked(body)), on_progress)

    def _judge(self, body: Body, on_progress: OnProgress | None) -> JudgeResult:
        return Judge(self.engine).judge(parse_judge_request(self._checked(body)), on_progress)

    def _classify(self, body: Body, on_progress: OnProgress | None) -> ClassifyResult:
        return self.classifier.classify(parse_classify_request(self._checked(body)), on_progress)

    def _embed(self, body: Body, on_progress: OnProgress | None) -> EmbedResult:
        return self.classifier.embed(parse_embed_request(self._checked(body)), on_progress)

    def _checked(self, body: Body) -> Body:
        """The body. Raises ModelNotFoundError if it names an adapter that is not loaded."""
        lora = body.get("model")
        if lora is not None and lora not in self.engine.loras.names:
            loaded = ", ".join(map(quote, self.engine.loras.names)) or "none"
            message = f"lora must be the name of a loaded LoRA adapter ({loaded}), got {describe(lora)}"
            raise ModelNotFoundError(message, code="model_not_found", param="lora")
        return body

    def load_lora(self, name: str, path: str | Path, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter, a folder that `peft` has saved. Requests choose it with `lora`.

        Args:
            name: The name that requests have for it.
            path: The folder, with adapter_config.json and adapter_model.safetensors.
            load_inplace: Replace an adapter of this name. Requests that run finish with the adapter that they began
                with.

        Raises:
            RequestError: The adapter cannot be used, or there is no room for it (`max_loras`). Nothing changed.
        """
        self.engine.load_lora(name, str(path), in_place=load_inplace)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that run finish with it.

        Raises:
            RequestError: No adapter has this name.
        """
        self.engine.loras.unload(name)

    def close(self) -> None:
        """Give the device's memory back; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(is_legal: bool, name: str, expected: str, got: object) -> None:
    if not is_legal:
        message = f"{name} must be {expected}, got {got!r}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
