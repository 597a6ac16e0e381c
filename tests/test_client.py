"""`Client` and `AsyncClient`: on a real server they return and raise what `Scorer` does for the same request."""

from __future__ import annotations

import asyncio
import doctest
import gc
import inspect
import json
import linecache
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from prefixwise import AsyncClient, Client, PrefixwiseWarning, Scorer, ServiceError
from prefixwise.backends.fake import FakeBackend
from prefixwise.client import async_client as async_module
from prefixwise.client import client as client_module
from prefixwise.client.attempts import Attempts, Settings, TimeLeft
from prefixwise.contract.errors import (
    AuthenticationError,
    BackendError,
    ClientSettingError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    InvalidValueError,
    ModelNotFoundError,
    NotFoundError,
    QueueFullError,
    RequestError,
    UnavailableError,
    VocabularyError,
    json_values,
)
from prefixwise.contract.methods import ScoringMethods
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.reranker import Reranker
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, merging_tokenizer
from tests.server.letters_profile import letters_choice
from tests.server.server_process import ServerProcess, real_server, server_process


class FakeScorer(Scorer):
    """`Scorer` on the model that the server of these tests has."""

    def __init__(self) -> None:
        scheduler = Scheduler(FakeBackend(vocab_size=512, max_context_len=1 << 20), SchedulerOptions())
        config = EngineConfig("fake-model", profiles=letters_choice())
        self.engine = ScoringEngine(config, scheduler, merging_tokenizer(chat_template=CHAT_TEMPLATE))
        self.reranker, self.classifier = Reranker(self.engine), Classifier(self.engine)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("--tokenizer", "--api-key=secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url + "/", api_key="secret") as made:
        yield made


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with FakeScorer() as made:
        yield made


def asynchronously(server: ServerProcess, method: str, *args: object, **options: object) -> Any:
    async def call() -> Any:
        async with AsyncClient(server.url, api_key="secret") as made:
            return await getattr(made, method)(*args, **options)

    return asyncio.run(call())


REQUESTS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("score", ([1, 2, 3], [[4, 5], [6], []]), {"label_token_ids": [7, 8], "apply_softmax": True}),
    ("score", (np.array([1, 2]), [np.array([4, 5])]), {"label_token_ids": np.array([7, 8]), "score_mode": "logit"}),
    ("score", ("xa", ["b", "bc", ""]), {"labels": ["y", "z"], "suffix": "c", "max_tokens_per_item": 1}),
    ("score", ([1], [[4], [999]]), {"label_token_ids": [7], "on_item_error": "report"}),
    ("score", ("a", ["b", "\ud800"]), {"labels": ["y"], "on_item_error": "report"}),
    ("score", ([1], [[4], [5]]), {"label_token_ids": [7], "return_pooled_hidden_states": True}),
    (
        "score",
        ([1, 9], [[4], [9]]),
        {
            "label_token_ids": [7],
            "embed_override_token_id": 9,
            "query_embed_overrides": np.ones((1, 8), np.float32),
            "item_embed_overrides": [None, np.full((1, 8), 0.5)],
        },
    ),
    ("rerank", ("ab", ["cd", {"text": "ef"}, ""]), {"top_n": 2, "instruction": "b"}),
    ("rerank", ("ab", ["abcabc", "e"]), {"max_tokens_per_doc": 2}),
    ("judge", ([{"role": "user", "content": "x{item}"}], ["ab", "c"]), {"answers": ["y", "yz"], "values": [1, 2.5]}),
    ("judge", ([{"role": "user", "content": "xabc"}],), {"answers": ("x", "y")}),
    ("judge", (({"role": "user", "content": "{item}"},), ["xyz"]), {"answers": "y/z", "max_tokens_per_item": 1}),
    ("embed", ([[1, 2, 3], [4]],), {}),
    ("embed", (["abc", "ab"],), {"truncate_prompt_tokens": 1}),
]


def as_values(result: Any) -> dict[str, Any]:
    """What two results of the same request have in common."""
    found = {name: value for name, value in vars(result).items() if name != "rows"}
    for name in ("embeddings", "pooled_hidden_states"):
        if found.get(name) is not None:
            found[name] = np.stack(found[name]).tolist()
    if "items" in found:  # a scorer has emptied wrong items, before it knows which result they are for
        wrong = {error.index for error in found["item_errors"]}
        found["items"] = [None if index in wrong else item for index, item in enumerate(found["items"])]
    return found


@pytest.mark.parametrize(("method", "args", "options"), REQUESTS)
def test_results_are_those_of_a_scorer(
    method: str, args: tuple[Any, ...], options: dict[str, Any], client: Client, scorer: Scorer, server: ServerProcess
) -> None:
    with json_values():  # as a server's errors show them
        expected = as_values(getattr(scorer, method)(*args, **options))
    assert as_values(getattr(client, method)(*args, **options)) == expected
    assert as_values(asynchronously(server, method, *args, **options)) == expected


def test_tensors_are_token_ids(client: Client, scorer: Scorer, server: ServerProcess) -> None:
    tensor = pytest.importorskip("torch").tensor
    items, labels = [tensor([4, 5]), range(2)], {"label_token_ids": tensor([7, 8])}
    test_results_are_those_of_a_scorer("embed", ([range(1, 4), tensor([4])],), {}, client, scorer, server)
    test_results_are_those_of_a_scorer("score", (tensor([1]), items), labels, client, scorer, server)


@pytest.fixture(scope="module")
def classifier_server() -> Iterator[ServerProcess]:
    with server_process("--num-classes=3") as running:
        yield running


def test_classes_are_those_of_the_server(classifier_server: ServerProcess) -> None:
    with Client(classifier_server.url) as client:
        classes = client.classify([[1, 2], [3]])
        assert len(classes) == 2
        assert classes[0].label in classes.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert sum(classes[0].probs) == pytest.approx(1)
        scores = client.score([1], [[2], [3]])
        assert (scores.labels, scores.are_classes, scores.score_mode) == (classes.labels, True, "logit")


def test_progress_is_reported_when_the_response_is_there(client: Client, server: ServerProcess) -> None:
    reported: list[tuple[int, int]] = []
    options: dict[str, Any] = {"label_token_ids": [4], "on_progress": lambda *done: reported.append(done)}
    client.score([1], [[2], [3]], **options)
    asynchronously(server, "score", [1], [[2], [3], [4]], **options)
    assert reported == [(2, 2), (3, 3)]


def test_threads_share_a_client(client: Client) -> None:
    found: dict[int, ScoreResult] = {}

    def score(number: int) -> None:
        found[number] = client.score([number], [[2]], label_token_ids=[4], score_mode="logit")

    threads = [threading.Thread(target=score, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.scores[0][0] for each in found.values() if each.scores[0]}) == 8


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "code", "param", "request_"),
        [
            (InvalidRequestError, "mixed_input_types", "items", {"query": "a", "items": [[1]], "labels": ["y"]}),
            (VocabularyError, "token_id_exceeds_vocab", "label_token_ids", {"label_token_ids": [512]}),
            (InvalidValueError, "label_not_single_token", "labels", {"query": "a", "items": ["b"], "labels": ["yz"]}),
        ],
    )
    def test_they_are_a_scorers(
        self, client: Client, scorer: Scorer, kind: type[RequestError], code: str, param: str, request_: dict[str, Any]
    ) -> None:
        fields = {"query": [1], "items": [[2]], **request_}
        raised = []
        for made in (client, scorer):
            with pytest.raises(kind) as caught, json_values():  # as the server's errors show them
                made.score(**fields)
            raised.append((caught.value.code, caught.value.param, str(caught.value)))
        assert raised[0] == raised[1]
        assert raised[0][:2] == (code, param)

    def test_a_wrong_request_is_not_sent(self) -> None:
        with Client("http://127.0.0.1:1", max_retries=0) as client, pytest.raises(InvalidRequestError):
            client.score("a", [1], labels=["y"])  # type: ignore[list-item]

    @pytest.mark.parametrize(("method", "args"), [("rerank", ("ab", ["cd"])), ("embed", ([[1]],))])
    def test_an_unknown_adapter(
        self, client: Client, scorer: Scorer, server: ServerProcess, method: str, args: tuple[Any, ...]
    ) -> None:
        for made in (client, scorer):
            with pytest.raises(ModelNotFoundError, match='got "nope"'):
                getattr(made, method)(*args, lora="nope")
        with pytest.raises(ModelNotFoundError, match='got "nope"'):
            asynchronously(server, method, *args, lora="nope")

    def test_a_body_of_a_rerank_route_may_name_any_model(self, client: Client) -> None:
        assert client.post_rerank({"query": "ab", "documents": ["cd"], "model": "nope"}).model == "fake-model"
        assert client.rerank("ab", ["cd"], lora="fake-model").model == "fake-model"

    def test_many_requests_in_one_body(self, client: Client) -> None:
        body = {"requests": [{"query": "a", "items": ["b"]}], "labels": ["y"]}
        with pytest.raises(InvalidValueError, match="here each is a call or a row of its own") as caught:
            client.post_score(body)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "requests")

    def test_a_wrong_key(self, server: ServerProcess) -> None:
        with Client(server.url, api_key="guess") as client, pytest.raises(AuthenticationError):
            client.score([1], [[2]], label_token_ids=[3])

    def test_nobody_listens(self) -> None:
        with Client("http://127.0.0.1:1", max_retries=0) as client, pytest.raises(UnavailableError) as caught:
            client.score([1], [[2]], label_token_ids=[3])
        assert caught.value.code == "unreachable"
        assert "cannot reach http://127.0.0.1:1" in str(caught.value)

    def test_the_servers_warnings_are_pythons(self, client: Client, server: ServerProcess) -> None:
        with pytest.warns(PrefixwiseWarning, match="always 1.0") as caught:
            result = client.score([1], [[2]], label_token_ids=[3], apply_softmax=True)
        assert len(result.warnings) == 1
        assert caught[0].filename == __file__
        with pytest.warns(PrefixwiseWarning, match="always 1.0") as caught:
            asynchronously(server, "score", [1], [[2]], label_token_ids=[3], apply_softmax=True)
        assert caught[0].filename == __file__
        assert "await" in linecache.getline(__file__, caught[0].lineno)

    def test_documents_that_were_cut_are_a_warning(self, client: Client) -> None:
        with pytest.warns(PrefixwiseWarning, match=r"1 document\(s\) were longer than is read, and were cut") as caught:
            result = client.rerank("ab", [12 * "abc", "e"], max_tokens_per_doc=2)
        assert (len(result.truncated), result.warnings) == (1, (str(caught[0].message),))

    def test_the_warnings_of_tasks_name_the_file_that_runs_them(self, server: ServerProcess) -> None:
        async def gather() -> None:
            async with AsyncClient(server.url, api_key="secret") as made:
                calls = [made.score([each], [[2]], label_token_ids=[3], apply_softmax=True) for each in (1, 4)]
                await asyncio.gather(*calls)

        with pytest.warns(PrefixwiseWarning, match="always 1.0") as caught:
            asyncio.run(gather())
        assert {each.filename for each in caught} == {__file__}


def test_a_scorers_warnings_are_pythons(scorer: Scorer) -> None:
    with pytest.warns(PrefixwiseWarning, match="always 1.0") as caught:
        scorer.score([1], [[2]], label_token_ids=[3], apply_softmax=True)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "//v1//"])
def test_an_address_of_other_apis_clients_ends_in_v1(server: ServerProcess, path: str) -> None:
    with Client(server.url + path, api_key="secret") as client:
        assert client.url == server.url
        assert len(client.score([1], [[2]], label_token_ids=[3])) == len(client.embed([[1]])) == 1
    assert AsyncClient(server.url + path).url == server.url
    assert Client(f"http://v1/models{path}").url == "http://v1/models"
    assert Client("http://v1/").url == "http://v1"


def test_clients_and_scorers_show_what_they_are_for(client: Client, scorer: Scorer, server: ServerProcess) -> None:
    assert repr(client) == f"Client('{server.url}')"
    assert repr(AsyncClient(server.url)) == f"AsyncClient('{server.url}')"
    assert repr(scorer) == "Scorer('fake-model', backend='fake', device='cpu')"


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "127.0.0.1:30000"},
        {"url": "http://host/?a=b"},
        {"url": None},
        {"timeout": 0},
        {"timeout": None},
        {"timeout": "5"},
        {"api_key": "ключ"},
        {"api_key": 3},
        {"api_key": b"secret"},
        {"max_retries": -1},
        {"max_connections": 0},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ClientSettingError):
            kind(**{"url": "http://127.0.0.1:30000", **settings})


# Retries, against a server that replies what it is told to

SCORED = {"model": "m", "scores": [[0.5]], "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}}
Reply = tuple[int, dict[str, str], str]
CUT = 0  # no status: the connection is closed
DRIP = -1  # the response comes byte by byte, for a minute


class Script:
    """The replies of a server, one after another; the last one again and again."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.timeouts: list[float] = []
        self.peers: list[object] = []  # the connection of each request

    def next(self, peer: object, headers: Any) -> Reply:
        self.peers.append(peer)
        self.timeouts.append(float(headers["X-Request-Timeout"]))
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def scripted(*replies: Reply) -> Iterator[tuple[str, Script]]:
    script = Script(*replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, body = script.next(self.client_address, self.headers)
            if status == CUT:
                self.close_connection = True
                return
            self.send_response(200 if status == DRIP else status)
            for name, value in {**headers, "Content-Length": str(len(body.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            for byte in body.encode() if status == DRIP else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            self.wfile.write(b"" if status == DRIP else body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", script
        finally:
            running.shutdown()
            thread.join()


def refusal(status: int, code: str, kind: str, **headers: str) -> Reply:
    error = {"message": "not now", "type": kind, "param": None, "code": code}
    return status, headers, json.dumps({"error": error})


DONE: Reply = (200, {}, json.dumps(SCORED))
BUSY = refusal(429, "queue_full", "rate_limit_error", **{"Retry-After": "3"})
STARTING = refusal(503, "not_ready", "server_error")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that clients waited; they do not."""
    waited: list[float] = []

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("prefixwise.client.client.time.sleep", waited.append)
    monkeypatch.setattr("prefixwise.client.async_client.asyncio.sleep", pause)
    return waited


def score_at(url: str, is_async: bool, **settings: Any) -> ScoreResult:
    async def call() -> ScoreResult:
        async with AsyncClient(url, **settings) as made:
            return await made.score([1], [[2]], label_token_ids=[3])

    if is_async:
        return asyncio.run(call())
    with Client(url, **settings) as client:
        return client.score([1], [[2]], label_token_ids=[3])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
class TestRetries:
    def test_a_busy_and_a_starting_server_are_asked_again(self, waits: list[float], is_async: bool) -> None:
        with scripted(BUSY, STARTING, STARTING, DONE) as (url, script):
            assert score_at(url, is_async).scores == [[0.5]]
        assert waits[0] == 3.0
        assert 0.5 <= waits[1] <= 1.0
        assert 1.0 <= waits[2] <= 2.0
        assert sorted(script.timeouts, reverse=True) == script.timeouts
        assert script.timeouts[0] <= 180

    def test_not_more_often_than_allowed(self, waits: list[float], is_async: bool) -> None:
        with scripted(BUSY) as (url, script), pytest.raises(QueueFullError) as caught:
            score_at(url, is_async, max_retries=2)
        assert (len(script.timeouts), waits) == (3, [3.0, 3.0])
        assert (caught.value.retry_after, caught.value.code, str(caught.value)) == (3, "queue_full", "not now")

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [(format_datetime(datetime(2000, 1, 1, tzinfo=UTC), usegmt=True), 0), ("soon", None), ("²", None)],
    )
    def test_a_date_that_has_passed_is_no_wait_and_nonsense_says_nothing(
        self, waits: list[float], is_async: bool, value: str, seconds: int | None
    ) -> None:
        refused = refusal(503, "not_ready", "server_error", **{"Retry-After": value})
        with scripted(refused, DONE) as (url, _):
            score_at(url, is_async)
        assert waits == [0.0] if seconds == 0 else 0.25 <= waits[0] <= 0.5

    def test_a_date_to_come_is_waited_for(self, waits: list[float], is_async: bool) -> None:
        tomorrow = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
        with scripted(refusal(503, "not_ready", "server_error", **{"Retry-After": tomorrow}), DONE) as (url, _):
            score_at(url, is_async, timeout=1e6)
        assert 0 < waits[0] <= 86_400

    def test_not_if_the_wait_would_outlast_the_call(self, waits: list[float], is_async: bool) -> None:
        with scripted(BUSY) as (url, script), pytest.raises(QueueFullError):
            score_at(url, is_async, timeout=2.5)
        assert (len(script.timeouts), waits) == (1, [])

    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            (refusal(500, "internal_error", "server_error"), InternalError),
            (refusal(504, "deadline_exceeded", "server_error"), DeadlineExceededError),
            (refusal(404, "not_found", "invalid_request_error"), NotFoundError),
            ((404, {}, "<html>no such page</html>"), NotFoundError),
            ((400, {}, "nonsense"), RequestError),
            ((418, {}, "a teapot"), ServiceError),
            ((200, {}, "no JSON"), ServiceError),
            ((200, {}, '{"scores": 3}'), ServiceError),
        ],
    )
    def test_other_errors_are_raised_at_once(
        self, waits: list[float], is_async: bool, reply: Reply, kind: type[Exception]
    ) -> None:
        with scripted(reply) as (url, script), pytest.raises(kind):
            score_at(url, is_async)
        assert (len(script.timeouts), waits) == (1, [])

    @pytest.mark.parametrize("status", [418, 502])
    def test_a_status_that_is_no_error_of_ours_is_kept(self, status: int, is_async: bool) -> None:
        with scripted((status, {}, "a proxy's page")) as (url, _), pytest.raises(ServiceError) as caught:
            score_at(url, is_async)
        assert (caught.value.status, caught.value.code) == (status, f"http_{status}")

    def test_a_connection_that_breaks_is_made_again(self, waits: list[float], is_async: bool) -> None:
        with scripted((CUT, {}, ""), DONE) as (url, script):
            assert score_at(url, is_async).scores == [[0.5]]
        assert (len(script.timeouts), len(waits)) == (2, 1)


def test_a_call_ends_after_its_time(tmp_path: Any) -> None:
    with (
        server_process(f"--hold-until={tmp_path / 'never'}") as server,
        Client(server.url, timeout=0.5) as client,
        pytest.raises(DeadlineExceededError),
    ):
        client.score([1], [[2]], label_token_ids=[3])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_response_that_comes_byte_by_byte_is_not_waited_for_any_longer(is_async: bool) -> None:
    long: Reply = (DRIP, {}, json.dumps(SCORED) + " " * 3000)
    with scripted(long) as (url, _), pytest.raises(DeadlineExceededError):
        score_at(url, is_async, timeout=0.3)


def test_every_phase_of_an_attempt_has_the_seconds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr("prefixwise.client.attempts.monotonic", lambda: seconds)
    attempts = Attempts(Settings.checked("http://127.0.0.1:30000", None, 10.0, 3, 1))
    limits = attempts.arguments()["extensions"]["timeout"]
    assert limits.get("pool") == 10
    seconds += 6
    assert limits.get("read", None) == 4
    assert attempts.arguments()["headers"] == {"X-Request-Timeout": "4.000"}


def test_httpx_looks_up_the_limit_of_each_phase_the_wait_for_a_connection_included() -> None:
    asked: list[str] = []

    class Limits(TimeLeft):
        def get(self, phase: str, default: Any = None) -> float:
            asked.append(phase)
            return super().get(phase, default)

    with scripted(DONE) as (url, _), pytest.MonkeyPatch.context() as patch, Client(url) as client:
        patch.setattr("prefixwise.client.attempts.TimeLeft", Limits)
        client.score([1], [[2]], label_token_ids=[3])
    assert set(asked) == {"pool", "connect", "write", "read"}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_closed_client_says_so_as_a_closed_scorer_does(is_async: bool) -> None:
    async def call() -> None:
        client = AsyncClient("http://127.0.0.1:1")
        await client.aclose()
        await client.score([1], [[2]], label_token_ids=[3])

    with pytest.raises(BackendError, match="this client is closed"):
        if is_async:
            asyncio.run(call())
        else:
            client = Client("http://127.0.0.1:1")
            client.close()
            client.score([1], [[2]], label_token_ids=[3])
    scorer = FakeScorer()
    scorer.close()
    with pytest.raises(BackendError, match="this scorer is closed"):
        scorer.score([1], [[2]], label_token_ids=[3])


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # those of the loops that have ended
def test_an_async_client_may_be_used_from_one_event_loop_after_another() -> None:
    with scripted(DONE) as (url, script):
        client = AsyncClient(url, max_retries=0)
        for _ in range(3):
            assert asyncio.run(client.score([1], [[2]], label_token_ids=[3])).scores == [[0.5]]
        asyncio.run(client.aclose())
        with pytest.raises(BackendError, match="this client is closed"):
            asyncio.run(client.score([1], [[2]], label_token_ids=[3]))
        assert len(script.timeouts) == 3
        del client
        gc.collect()


def test_the_calls_of_an_event_loop_share_its_connections() -> None:
    async def connections(client: AsyncClient, num_calls: int) -> None:
        for _ in range(num_calls):
            await client.score([1], [[2]], label_token_ids=[3])
        await client.aclose()

    with scripted(DONE) as (url, script):
        asyncio.run(connections(AsyncClient(url), 3))
    assert len(set(script.peers)) == 1


# Docstrings


def test_the_methods_of_an_async_client_are_coroutine_functions() -> None:
    assert inspect.iscoroutinefunction(AsyncClient.score)
    assert not inspect.iscoroutinefunction(Client.score)


def test_help_speaks_of_python() -> None:
    text = "".join(inspect.getdoc(getattr(Scorer, name)) or "" for name in ("score", "rerank", "classify"))
    assert "True: cut a document that does not fit; False: it is an error." in text
    assert "its scores are None" in text
    assert "Report in `debug`" in text
    assert not re.search(r"\b(true:|false:|null|meta)\b", text)


def test_both_clients_have_the_methods_and_parameters_of_a_scorer() -> None:
    for name in ("score", "rerank", "judge", "classify", "embed"):
        assert getattr(Client, name) is getattr(ScoringMethods, name) is getattr(Scorer, name)
        asked, awaited = (inspect.signature(getattr(kind, name)).parameters for kind in (Client, AsyncClient))
        assert list(asked) == list(awaited)


@pytest.mark.parametrize("kind", [Scorer, Client, AsyncClient])
@pytest.mark.parametrize("name", ["score", "rerank", "judge", "classify", "embed"])
def test_help_explains_every_argument_what_is_returned_and_raised(kind: type, name: str) -> None:
    method = getattr(kind, name)
    text = inspect.getdoc(method) or ""
    for parameter in inspect.signature(method).parameters:
        assert parameter == "self" or f"\n    {parameter}: " in text, parameter
    sections = ["Args:", "Returns:", "Raises:", "Examples:"]
    assert [line for line in text.splitlines() if line in sections] == sections


def test_the_examples_of_the_docstrings_are_true(classifier_server: ServerProcess) -> None:
    with server_process("--tokenizer") as open_server:
        names = {"server_url": open_server.url, "classifier_url": classifier_server.url}
        found = [doctest.testmod(module, extraglobs=names) for module in (client_module, async_module)]
    assert sum(each.attempted for each in found) > 12
    assert not any(each.failed for each in found)


@pytest.mark.slow
def test_the_embedded_model_behind_a_server_gives_a_scorers_results() -> None:
    documents = ["Berlin is in Germany.", "Paris is the capital of France."]
    options: dict[str, Any] = {"labels": [" positive", " negative"], "suffix": " Sentiment:", "apply_softmax": True}
    with (
        real_server("--dtype=float32") as server,
        Client(server.url) as client,
        Scorer(device="cpu", dtype="float32") as scorer,
    ):
        for made in (client, scorer):
            ranked = made.score("Review: ", ["It broke.", "Wonderful service!"], **options).ranked()
            assert ranked[0].item == "Wonderful service!"
        for method, args, more in (("score", ("Review: ", documents), options), ("embed", (documents,), {})):
            asked, own = (as_values(getattr(made, method)(*args, **more)) for made in (client, scorer))
            assert {**asked, "usage": None} == {**own, "usage": None}
