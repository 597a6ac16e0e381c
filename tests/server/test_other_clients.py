"""More clients that people have, each against a server on a real port: `make test-clients` installs and runs them.

They need packages that contradict each other's neighbours in the environment of all tests, so they have one of their
own, without the fixtures of other tests; where a client is not installed, its tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.server_process import ServerProcess, server_process

KEY = "a-key-of-mine"
QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "The shop sells keys.", "Trains are safe."]
TOP = 3

Ranked = list[tuple[int, Any]]  # index and score, best first

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("DEEPEVAL_TELEMETRY_OPT_OUT", "1")

# What their packages warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip without these packages, but not in the session that exists to run them."""
    is_missing = any(find_spec(package) is None for package in packages)
    is_wanted = os.environ.get("NOX_CURRENT_SESSION") == "clients"
    return pytest.mark.skipif(is_missing and not is_wanted, reason=f"needs {', '.join(packages)}: make test-clients")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Its scores are arithmetic; texts become tokens as the embedded model has them."""
    with server_process("--backend=fake", f"--api-key={KEY}", program=("prefixwise", "serve")) as running:
        yield running


def ask(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> Ranked:
    """What the server says to no client in particular: the best of all."""
    results = ask(server, "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": TOP})["results"]
    return [(each["index"], pytest.approx(each["relevance_score"], abs=1e-6)) for each in results]


@pytest.fixture(scope="module")
def logits(server: ServerProcess) -> Ranked:
    """The same before the sigmoid."""
    ranked = ask(server, "/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})
    return [(each["index"], pytest.approx(each["score"], abs=1e-5)) for each in ranked[:TOP]]


@needs("langchain_core")
class TestLangchain:
    @staticmethod
    def ranked(compressor: Any) -> Ranked:
        from langchain_core.documents import Document

        documents = [Document(page_content=text) for text in DOCUMENTS]
        found = compressor.compress_documents(documents, QUERY)
        return [(DOCUMENTS.index(each.page_content), each.metadata["relevance_score"]) for each in found]

    @needs("langchain_cohere")
    def test_cohere(self, server: ServerProcess, expected: Ranked) -> None:
        from langchain_cohere import CohereRerank

        compressor = CohereRerank(base_url=server.url, cohere_api_key=KEY, model="any", top_n=TOP)
        assert self.ranked(compressor) == expected

    @needs("langchain_nvidia_ai_endpoints")
    def test_nvidia(self, server: ServerProcess, logits: Ranked) -> None:
        from langchain_nvidia_ai_endpoints import NVIDIARerank

        compressor = NVIDIARerank(base_url=f"{server.url}/v1", api_key=KEY, model="any", top_n=TOP, truncate="END")
        assert self.ranked(compressor) == logits

    @needs("langchain_community", "infinity_client")
    def test_infinity(self, server: ServerProcess, expected: Ranked) -> None:
        from infinity_client import AuthenticatedClient
        from langchain_community.document_compressors import InfinityRerank

        # The type of its field is the client without a key, which the other one is not.
        compressor = InfinityRerank.model_construct(
            client=AuthenticatedClient(base_url=server.url, token=KEY), model="any", top_n=TOP
        )
        assert self.ranked(compressor) == expected


@needs("infinity_client")
def test_infinity_client(server: ServerProcess, expected: Ranked, logits: Ranked) -> None:
    from infinity_client import AuthenticatedClient
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput, ReRankResult

    client = AuthenticatedClient(base_url=server.url, token=KEY)
    for raw_scores, wanted in ((False, expected), (True, logits)):
        body = RerankInput(QUERY, DOCUMENTS, return_documents=True, raw_scores=raw_scores, top_n=TOP)
        answer = rerank.sync(client=client, body=body)
        assert isinstance(answer, ReRankResult)
        assert [(each.index, each.relevance_score) for each in answer.results] == wanted
        assert [each.document for each in answer.results] == [DOCUMENTS[index] for index, _ in wanted]
        assert (answer.object_, answer.usage.total_tokens > 0) == ("rerank", True)


@needs("llama_index.core" if find_spec("llama_index") else "llama_index")
class TestLlamaIndex:
    @staticmethod
    def ranked(postprocessor: Any) -> Ranked:
        from llama_index.core.schema import NodeWithScore, TextNode

        nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
        found = postprocessor.postprocess_nodes(nodes, query_str=QUERY)
        return [(DOCUMENTS.index(each.text), each.score) for each in found]

    def test_cohere(self, server: ServerProcess, expected: Ranked) -> None:
        from llama_index.postprocessor.cohere_rerank import CohereRerank

        assert self.ranked(CohereRerank(top_n=TOP, api_key=KEY, base_url=server.url)) == expected

    def test_jina(self, server: ServerProcess, expected: Ranked) -> None:
        from llama_index.postprocessor.jinaai_rerank import JinaRerank

        assert self.ranked(JinaRerank(top_n=TOP, api_key=KEY, base_url=f"{server.url}/v1")) == expected

    def test_jina_shows_our_message(self, server: ServerProcess) -> None:
        from llama_index.postprocessor.jinaai_rerank import JinaRerank

        with pytest.raises(RuntimeError, match="the API key must be sent as"):
            self.ranked(JinaRerank(top_n=TOP, api_key="another", base_url=f"{server.url}/v1"))

    def test_text_embeddings_inference(self, server: ServerProcess, expected: Ranked) -> None:
        from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

        reranker = TextEmbeddingInference(top_n=TOP, base_url=server.url, auth_token=f"Bearer {KEY}")
        assert self.ranked(reranker) == expected


@needs("rerankers")
@pytest.mark.parametrize(
    ("provider", "path"),
    [
        ("cohere", "/v1/rerank"),
        ("jina", "/v1/rerank"),
        ("voyage", "/v1/rerank"),
        ("mixedbread.ai", "/v1/reranking"),
        ("text-embeddings-inference", "/rerank"),
    ],
)
def test_rerankers(server: ServerProcess, expected: Ranked, provider: str, path: str) -> None:
    from rerankers.models.api_rankers import APIRanker

    ranker = APIRanker("any", KEY, provider, url=server.url + path)
    found = ranker.rank(QUERY, DOCUMENTS)
    assert [(each.document.doc_id, each.score) for each in found.results[:TOP]] == expected
    assert len(found.results) == len(DOCUMENTS)


@needs("haystack")
class TestHaystack:
    @staticmethod
    def ranked(ranker: Any) -> Ranked:
        from haystack import Document

        if hasattr(ranker, "warm_up"):
            ranker.warm_up()
        found = ranker.run(query=QUERY, documents=[Document(content=text) for text in DOCUMENTS], top_k=TOP)
        return [(DOCUMENTS.index(each.content), each.score) for each in found["documents"]]

    @staticmethod
    def secret() -> Any:
        from haystack.utils import Secret

        return Secret.from_token(KEY)

    def test_cohere(self, server: ServerProcess, expected: Ranked) -> None:
        from haystack_integrations.components.rankers.cohere import CohereRanker

        assert self.ranked(CohereRanker(model="any", api_key=self.secret(), api_base_url=server.url)) == expected

    def test_jina(self, server: ServerProcess, expected: Ranked) -> None:
        from haystack_integrations.components.rankers.jina import JinaRanker

        ranker = JinaRanker(model="any", api_key=self.secret(), base_url=f"{server.url}/v1/rerank")
        assert self.ranked(ranker) == expected

    def test_text_embeddings_inference(self, server: ServerProcess, expected: Ranked) -> None:
        from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

        assert self.ranked(HuggingFaceTEIRanker(url=server.url, token=self.secret())) == expected

    def test_nvidia(self, server: ServerProcess, logits: Ranked) -> None:
        from haystack_integrations.components.rankers.nvidia import NvidiaRanker

        ranker = NvidiaRanker(model="any", api_key=self.secret(), api_url=f"{server.url}/v1", truncate="END")
        assert self.ranked(ranker) == logits


@needs("voyageai")
def test_voyage(server: ServerProcess, expected: Ranked) -> None:
    import voyageai

    client = voyageai.Client(KEY, base_url=f"{server.url}/v1", max_retries=0)
    answer = client.rerank(QUERY, DOCUMENTS, model="any", top_k=TOP)
    assert [(each.index, each.relevance_score) for each in answer.results] == expected
    assert answer.total_tokens > 0
    with pytest.raises(voyageai.error.InvalidRequestError, match="query must hold at least one character"):
        client.rerank("", DOCUMENTS, model="any")


@needs("mixedbread")
def test_mixedbread(server: ServerProcess, expected: Ranked) -> None:
    import mixedbread

    client = mixedbread.Mixedbread(api_key=KEY, base_url=server.url, max_retries=0)
    answer = client.rerank(query=QUERY, input=DOCUMENTS, model="any", top_k=TOP, return_input=True)
    assert [(each.index, each.score) for each in answer.data] == expected
    assert [each.input for each in answer.data] == [DOCUMENTS[index] for index, _ in expected]
    with pytest.raises(mixedbread.BadRequestError, match="queries are scored as they are sent"):
        client.rerank(query=QUERY, input=DOCUMENTS, model="any", rewrite_query=True)


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, for a program that would fetch one from a hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@needs("aiperf")
@pytest.mark.parametrize("kind", ["nim-rankings", "cohere-rankings", "hf-tei-rankings"])
def test_aiperf(server: ServerProcess, tmp_path: Path, kind: str) -> None:
    """NVIDIA's load generator: all of its requests succeed, and it reads the rankings."""
    options = {
        "model": "any",
        "url": server.url,
        "endpoint-type": kind,
        "api-key": KEY,
        "tokenizer": byte_tokenizer(tmp_path),
        "request-count": 6,
        "concurrency": 2,
        "rankings-passages-mean": 3,
        "rankings-passages-prompt-token-mean": 20,
        "rankings-query-prompt-token-mean": 10,
        "num-dataset-entries": 3,
        "output-artifact-dir": tmp_path,
        "ui": "none",
    }
    command = [str(Path(sys.executable).with_name("aiperf")), "profile"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text(encoding="utf-8"))
    assert report["request_count"]["avg"] == 6
    assert not report.get("error_summary"), report["error_summary"]


@needs("deepeval")
def test_a_judge_of_deepeval(server: ServerProcess) -> None:
    """Its hook for custom models: G-Eval takes the expected value of the distribution over its scale."""
    from deepeval.metrics import GEval
    from deepeval.models.base_model import DeepEvalBaseLLM
    from deepeval.test_case import LLMTestCase, LLMTestCaseParams

    prompts: list[str] = []

    class Judge(DeepEvalBaseLLM):  # type: ignore[misc]  # the package may be missing
        def load_model(self) -> str:
            return server.url

        def get_model_name(self) -> str:
            return "prefixwise"

        def generate(self, prompt: str, schema: Any = None) -> Any:
            prompts.append(prompt)
            return schema(score=expected_value(prompt), reason="")

        async def a_generate(self, prompt: str, schema: Any = None) -> Any:
            return self.generate(prompt, schema)

    def expected_value(prompt: str) -> float:
        body = {"messages": [{"role": "user", "content": prompt.replace("{item}", "item")}], "answers": "0-10"}
        value: float = ask(server, "/v1/judge", body)["results"][0]["expected_value"]
        return value

    metric = GEval(
        name="politeness",
        evaluation_steps=["Rate how polite the actual output is."],
        evaluation_params=[LLMTestCaseParams.ACTUAL_OUTPUT],
        model=Judge(),
        async_mode=False,
    )
    metric.measure(LLMTestCase(input=QUERY, actual_output="Thank you."), _show_indicator=False)
    (prompt,) = prompts
    assert "Thank you." in prompt
    assert metric.score == pytest.approx(expected_value(prompt) / 10, abs=1e-6)
    assert 0 < metric.score < 1
