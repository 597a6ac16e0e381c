"""Recovery from a failed step: which of its requests run again, which get the error, and whether the device works.

a step fails           its requests run again, each alone, so that one of them cannot fail the others
it ran out of memory   they run again in smaller steps
a request fails alone  the device is probed: if that works, the request gets the error, else the engine has failed
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prefixwise.contract.errors import BackendError
from prefixwise.engine.health import EngineFailedError
from prefixwise.engine.in_flight import InFlightSteps
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.stats import Counters
from prefixwise.engine.step import Step
from prefixwise.engine.step_limits import StepBudget
from prefixwise.forward.backend import Backend

log = logging.getLogger("prefixwise")

MAX_NOT_FINITE = 3  # steps in a row without a finite logit, before the device is probed


class Recovery:
    """Judges steps and requests, on the scheduler's thread."""

    def __init__(self, backend: Backend, in_flight: InFlightSteps, budget: StepBudget, counters: Counters) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._budget = budget
        self._counters = counters
        self._num_not_finite = 0  # steps in a row

    def count_step(self, *, is_finite: bool) -> None:
        """A step has ended. Raises EngineFailedError if the device gives no finite number any more."""
        self._budget.count_step()
        self._num_not_finite = 0 if is_finite else self._num_not_finite + 1
        if self._num_not_finite == MAX_NOT_FINITE:
            self._num_not_finite = 0
            self._probe()

    def blamed_requests(self, step: Step, error: BaseException) -> Sequence[RequestState]:
        """The requests that get the error of a step that has failed and was rolled back. The other ones run again.

        Raises EngineFailedError if the device does not work.
        """
        self._counters.failed_steps += 1
        if self._backend.is_out_of_memory(error) and self._budget.shrink(step.num_tokens):
            log.warning("out of memory: a step has at most %d tokens from now on", self._budget.limits.most_tokens)
        elif any(request.is_suspect for request in step.requests):  # it ran alone
            self._probe()
            return step.requests
        else:
            for request in step.requests:
                request.is_suspect = True
        self._counters.reruns += sum(not request.is_cancelled for request in step.requests)
        return ()

    def _probe(self) -> None:
        """Raises EngineFailedError if the device cannot compute one token."""
        try:
            self._in_flight.probe()
        except EngineFailedError:
            raise
        except BaseException as error:
            log.error("a probe of the device failed", exc_info=error)
            raise EngineFailedError("the device has failed: it cannot compute one token any more") from error


def error_of_request(error: BaseException) -> Exception:
    """What is raised in the request's caller, whose thread or event loop must not end."""
    return error if isinstance(error, Exception) else BackendError(f"a forward pass failed: {error!r}")
