"""`POST /v1/judge`: the distribution over a few answers, for each item or for one chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prefixwise.contract.judge import parse_judge_request
from prefixwise.contract.judge_result import Judgement
from prefixwise.engine.judge import Judge, PreparedJudge
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import RESULT_BYTES, Body, Prepared, SingleDialect, add_warnings
from prefixwise.server.service import Service

_NUMBERS_BYTES = 3 * 25  # of the expected value, the entropy and the mass
_CHAR_BYTES = 6  # of an answer in JSON, where characters are escaped


class Judging(SingleDialect):
    """Judgements in the order of the items."""

    result_bytes = RESULT_BYTES + _NUMBERS_BYTES

    def has_text(self, body: Body) -> bool:
        return True

    def prepare(self, service: Service, body: Body) -> Prepared:
        request = parse_judge_request(body)
        model = service.names.answer_to(request.model)
        judge = Judge(service.engine).prepare(request)
        answer_bytes = _CHAR_BYTES * max(map(len, request.answers))
        return Prepared(
            self, {"judge": judge}, model, judge.scoring, priority=request.priority, answer_bytes=answer_bytes
        )

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        judge = prepared.body["judge"]
        assert isinstance(judge, PreparedJudge), "`prepare` sets it"
        result = Judge(service.engine).finish(judge, state)
        add_warnings(context, result.warnings)
        return {
            "object": "judge",
            "model": prepared.model,
            "answers": list(result.answers),
            "results": _entries(result.results),
            "usage": result.usage.to_json(),
            **({"truncated": (asdict(each) for each in result.truncated)} if result.truncated else {}),
            **({"warnings": list(result.warnings)} if result.warnings else {}),
            **({"debug": dict(result.debug)} if result.debug else {}),
        }


def _entries(results: list[Judgement]) -> Iterator[dict[str, object]]:
    """Without the items, which the client has."""
    for each in results:
        yield {
            "index": each.index,
            "answer": each.answer,
            "probs": each.probs,
            "expected_value": each.expected_value,
            "entropy": each.entropy,
            "mass": each.mass,
        }
