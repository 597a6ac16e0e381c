"""A quantised model against a reference on the same requests: two servers, one after the other.

The requests are those of a workload, or any bodies of `/v1/score`, one per line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwise.bench.client import ScoreClient
from prefixwise.bench.files import now_utc, parse_artifact, read_bytes
from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.quantization import (
    QUANTIZATION_VERSION,
    QuantizationCheck,
    QuantizationRequest,
    judge_quantization,
    metrics_of,
)
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.options import EMBEDDED, QuantizationBounds
from prefixwise.bench.processes import local_server
from prefixwise.bench.run.workload import WorkloadOptions, make_workload
from prefixwise.bench.server_facts import server_fact
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError, describe

_FACTS = (
    *("checkpoint_quantization", "dtype", "compute_dtype", "quantization", "kv_cache_dtype"),
    *("prefix_attention_dtype", "backend", "device"),
)


@dataclass(frozen=True)
class NamedRequests:
    """Bodies of `/v1/score` by the names that the artifact gives them."""

    source: str
    bodies: Mapping[str, dict[str, Any]]


def make_requests(model: str, options: WorkloadOptions) -> NamedRequests:
    """The canonical workload of this size. Raises ArtifactError."""
    workload = make_workload(options, token_facts(model))
    size = f"{options.query_tokens} + {options.num_items} x {options.item_tokens} tokens"
    return NamedRequests(f"the canonical workload, {size}, seed {options.seed}", _bodies_of(workload))


def read_requests(path: Path) -> NamedRequests:
    """A file of `bench workload`, or one request per line. Raises ArtifactError."""
    content = read_bytes(path)
    if path.suffix == ".json":
        return NamedRequests(str(path), _bodies_of(parse_artifact(content, Workload, str(path))))
    lines = enumerate(content.decode(errors="replace").splitlines(), 1)
    bodies = {f"line {number}": _body(path, number, line) for number, line in lines if line.strip()}
    if not bodies:
        raise ArtifactError(f"{path} has no requests: expected one JSON object per line")
    return NamedRequests(str(path), bodies)


def _bodies_of(workload: Workload) -> dict[str, dict[str, Any]]:
    return {
        each.request_id: {
            "query": each.query_token_ids,
            "items": each.items_token_ids,
            "label_token_ids": each.label_token_ids,
            "apply_softmax": each.apply_softmax,
            "item_first": each.item_first,
        }
        for each in workload.requests
    }


def _body(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path}:{number}: expected a JSON object, got {describe(line)}") from None
    items = body.get("items") if isinstance(body, dict) else None
    if not isinstance(items, list) or not items:
        raise ArtifactError(f"{path}:{number}: expected a request with a list of items, got {describe(body)}")
    return dict(body)


@dataclass(frozen=True)
class Side:
    """One of both models, and the flags of its server."""

    model: str
    flags: tuple[str, ...] = ()

    @property
    def server_flags(self) -> list[str]:
        return [*([] if self.model == EMBEDDED else ["--model-path", self.model]), *self.flags]


@dataclass(frozen=True)
class QuantizationRun:
    """Scores the requests on both sides, and judges."""

    model: Side
    reference: Side
    requests: NamedRequests
    bounds: QuantizationBounds
    log_folder: Path
    on_step: Callable[[str], None]
    introduce: Callable[[ScoreClient], dict[str, Any]]  # says which server it is, and gives what it reports
    timeout_sec: float = 180.0

    def __call__(self) -> QuantizationCheck:
        """Raises CallError where a request fails, ServerStartError where a server does not start, ArtifactError where
        the scores cannot be compared."""
        (scores, server), (expected, other) = (
            self._scores_of(side, name) for side, name in ((self.model, "model"), (self.reference, "reference"))
        )
        requests = [
            QuantizationRequest(request_id=name, scores=rows, reference_scores=others)
            for name, rows, others in zip(self.requests.bodies, scores, expected, strict=True)
        ]
        try:
            metrics = metrics_of(requests)
        except ValueError as error:
            raise ArtifactError(f"the two models cannot be compared: {error}") from None
        checks = judge_quantization(metrics, self.bounds)
        return QuantizationCheck(
            schema_version=QUANTIZATION_VERSION,
            generated_at_utc=now_utc(),
            model=self.model.model,
            reference=self.reference.model,
            workload=self.requests.source,
            model_server=server,
            reference_server=other,
            metrics=metrics,
            checks=checks,
            all_pass=all(check.passed for check in checks.values()),
            requests=requests,
        )

    def _scores_of(self, side: Side, name: str) -> tuple[Sequence[Scores], dict[str, Any]]:
        """The scores of every request, and the facts of the server."""
        self.on_step(f"{name}: server")
        with (
            local_server(side.server_flags, self.log_folder / f"{name}_server.log") as server,
            ScoreClient(server.url, timeout_sec=self.timeout_sec) as client,
        ):
            info = self.introduce(client)
            self.on_step(f"{name}: {len(self.requests.bodies)} requests")
            scores = [client.score(body).scores for body in self.requests.bodies.values()]
        facts = {fact: server_fact(info, fact) for fact in _FACTS}
        return scores, {**facts, "flags": " ".join(side.flags)}
