"""The operations of the API: method, path, schemas and statuses of every route, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, NamedTuple

Document = dict[str, Any]

_IDS_EXAMPLE = {"query": [1, 2, 3], "items": [[4, 5], [6]], "label_token_ids": [7, 8], "apply_softmax": True}
_TEXT_EXAMPLE = {
    "query": "Is this about food? ",
    "items": ["pizza", "tax law"],
    "labels": [" yes", " no"],
    "label_scoring": "sequence",
    "apply_softmax": True,
}

_RERANK_EXAMPLE: dict[str, object] = {
    "query": "What is the capital of France?",
    "documents": ["Berlin is in Germany.", "Paris is the capital of France."],
}

_MANY_EXAMPLE: dict[str, object] = {
    "requests": [{"query": [1, 2, 3], "items": [[4, 5], [6]]}, {"query": [9], "items": [[4, 5]]}],
    "label_token_ids": [7, 8],
    "apply_softmax": True,
}
_JUDGE_EXAMPLE: dict[str, object] = {
    "messages": [{"role": "user", "content": "Rate how polite this is, from 1 to 5. {item}"}],
    "items": ["Shut up.", "Thank you very much."],
    "answers": "1-5",
}
_PAIRS_EXAMPLE: dict[str, object] = {
    "text_1": _RERANK_EXAMPLE["query"],
    "text_2": _RERANK_EXAMPLE["documents"],
}

_WORKING = (500, 503)  # of all routes that need the engine


_REPORT_NAME = {
    "name": "name",
    "in": "query",
    "required": True,
    "description": "A name from GET /reports/list.",
    "schema": {"type": "string"},
}


class Operation(NamedTuple):
    """One method of one path. `answer` is the media type or the schema of a response with status 200."""

    method: str
    path: str
    summary: str
    answer: str
    statuses: tuple[int, ...] = ()  # of errors
    request: str | None = None  # a schema's name
    examples: dict[str, object] = {}  # noqa: RUF012  # read only
    has_timeout: bool = False
    is_open: bool = False  # without an API key
    parameters: tuple[Document, ...] = ()
    error: str = "Error"  # a schema's name
    tag: str = "Server"  # a key of TAGS


# The groups of operations, in the order of the page.
TAGS = {
    "Score": "Score items, many queries, or pairs of texts; judge items; classify and embed inputs.",
    "Complete": "Log-probabilities of prompts, and the one token that follows a prompt or a chat, like OpenAI.",
    "Rerank": "Order documents by a query, in the formats of several APIs.",
    "Prefix": "Pin queries in the KV cache.",
    "LoRA": "Load and unload LoRA adapters (--allow-runtime-lora-updating).",
    "Server": "The model, its tokens, health, configuration and metrics; the pages.",
    "Reports": "Artifacts of benchmark and validation runs.",
}

OPERATIONS = (
    Operation(
        "post",
        "/v1/score",
        "Score items against a query, or many queries with items of their own; pairs of texts, like vLLM.",
        "AnyScoreResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "AnyScoreRequest",
        {"token ids": _IDS_EXAMPLE, "text": _TEXT_EXAMPLE, "many": _MANY_EXAMPLE, "pairs": _PAIRS_EXAMPLE},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/score",
        "Score pairs of texts, like vLLM; takes every body that /v1/score takes.",
        "VllmScoreResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "VllmScoreRequest",
        {"pairs": _PAIRS_EXAMPLE},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/generative_scoring",
        "The probability of the first label token after each item, like vLLM.",
        "VllmScoreResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "GenerativeScoringRequest",
        {"token ids": {name: value for name, value in _IDS_EXAMPLE.items() if name != "apply_softmax"}},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/v1/judge",
        "The probabilities of a few answers to a chat, for each item that is put into it.",
        "JudgeResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "JudgeRequest",
        {"rubric": _JUDGE_EXAMPLE},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/v1/completions",
        "The log-probabilities of prompts' tokens (`echo`), and the most likely token after each prompt.",
        "CompletionResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "CompletionRequest",
        {
            "log-likelihoods": {"prompt": [[1, 2, 3], [1, 2, 4]], "max_tokens": 0, "echo": True, "logprobs": 1},
            "next token": {"prompt": "Is this about food?", "max_tokens": 1, "logprobs": 5},
        },
        has_timeout=True,
        tag="Complete",
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "The most likely token after a chat, with the log-probabilities of others.",
        "ChatCompletionResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "ChatCompletionRequest",
        {
            "judge": {
                "messages": [{"role": "user", "content": "Rate how polite this is, from 1 to 5: Thank you."}],
                "max_tokens": 1,
                "logprobs": True,
                "top_logprobs": 5,
            }
        },
        has_timeout=True,
        tag="Complete",
    ),
    Operation(
        "post",
        "/classify",
        "The classes of whole inputs, for models with a classifier's head, like vLLM.",
        "ClassifyResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "ClassifyRequest",
        {"texts": {"input": ["The chef prepared a meal.", "Rain"]}, "token ids": {"input": [[1, 2, 3], [4, 5]]}},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "The hidden state after the last token of whole inputs, like OpenAI; any model has it.",
        "EmbedResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "EmbedRequest",
        {"texts": {"input": ["The chef prepared a meal.", "Rain"]}, "token ids": {"input": [[1, 2, 3], [4, 5]]}},
        has_timeout=True,
        tag="Score",
    ),
    Operation(
        "post",
        "/v1/rerank",
        "Order documents by a query, like Cohere (version 1) and Jina; by the fields also like SGLang, Voyage, "
        "Infinity and Mixedbread.",
        "AnyRerankV1Response",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "AnyRerankV1Request",
        {
            "documents": {**_RERANK_EXAMPLE, "top_n": 1, "return_documents": True},
            "SGLang": {**_RERANK_EXAMPLE, "instruct": "Does the document answer the question?"},
            "Voyage": {**_RERANK_EXAMPLE, "top_k": 1, "truncation": True},
            "Infinity": {**_RERANK_EXAMPLE, "raw_scores": False},
        },
        has_timeout=True,
        error="AnyV1Error",
        tag="Rerank",
    ),
    Operation(
        "post",
        "/v2/rerank",
        "Order documents by a query, like Cohere (version 2).",
        "RerankV2Response",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "RerankV2Request",
        {"documents": {**_RERANK_EXAMPLE, "max_tokens_per_doc": 512}},
        has_timeout=True,
        tag="Rerank",
    ),
    Operation(
        "post",
        "/rerank",
        "Order documents by a query, like Text Embeddings Inference; with `documents`, like /v1/rerank.",
        "AnyRerankResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "AnyRerankRequest",
        {
            "texts": {"query": _RERANK_EXAMPLE["query"], "texts": _RERANK_EXAMPLE["documents"], "return_text": True},
            "documents": _RERANK_EXAMPLE,
        },
        has_timeout=True,
        error="AnyError",
        tag="Rerank",
    ),
    Operation(
        "post",
        "/v1/ranking",
        "Order passages by a query, like NVIDIA's NIM for reranking.",
        "NvidiaRankingResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "NvidiaRankingRequest",
        {
            "passages": {
                "query": {"text": _RERANK_EXAMPLE["query"]},
                "passages": [{"text": "Berlin is in Germany."}, {"text": "Paris is the capital of France."}],
                "truncate": "END",
            }
        },
        has_timeout=True,
        tag="Rerank",
    ),
    Operation(
        "post",
        "/v1/reranking",
        "Order documents by a query, like Mixedbread.",
        "MixedbreadRerankResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "MixedbreadRerankRequest",
        {"input": {"query": _RERANK_EXAMPLE["query"], "input": _RERANK_EXAMPLE["documents"], "top_k": 1}},
        has_timeout=True,
        tag="Rerank",
    ),
    Operation(
        "post",
        "/v1/prefix",
        "Compute a query's KV blocks now and pin them in the KV cache for later requests.",
        "Prefix",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "PrefixRequest",
        {
            "token ids": {"query": [1, 2, 3], "ttl_seconds": 60},
            "for reranking": {"query": _RERANK_EXAMPLE["query"], "profile": "default"},
        },
        has_timeout=True,
        tag="Prefix",
    ),
    Operation("get", "/v1/prefix", "List the pinned prefixes.", "PrefixList", _WORKING, tag="Prefix"),
    Operation(
        "delete", "/v1/prefix/{prefix_id}", "Release a pinned prefix.", "PrefixReleased", (404, *_WORKING), tag="Prefix"
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize texts.",
        "TokenizeResponse",
        (400, 404, 413, *_WORKING, 504),
        "TokenizeRequest",
        {"one text": {"text": "Is this about food?"}, "many": {"text": ["pizza", "tax law"]}},
        has_timeout=True,
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids.",
        "DetokenizeResponse",
        (400, 404, 413, 422, *_WORKING, 504),
        "DetokenizeRequest",
        {"token ids": {"tokens": [1, 2, 3]}},
        has_timeout=True,
    ),
    Operation(
        "get",
        "/tokenizer_info",
        "Special tokens, chat template and sizes, for clients that count tokens.",
        "TokenizerInfo",
        (400, *_WORKING),
    ),
    Operation(
        "get", "/v1/models", "The names under which the model is served, and the LoRA adapters.", "ModelList", (500,)
    ),
    Operation("get", "/v1/models/{model}", "One entry of the list of models.", "Model", (404, 500)),
    *(
        Operation(
            "post",
            path,
            f"Load a LoRA adapter from a folder on the server, like {peer}.",
            answer,
            (400, 403, 413, *_WORKING),
            "LoadLoraRequest",
            {"adapter": {"lora_name": "support", "lora_path": "/adapters/support"}},
            tag="LoRA",
        )
        for path, peer, answer in (
            ("/v1/load_lora_adapter", "vLLM", "text/plain"),
            ("/load_lora_adapter", "SGLang", "LoraResponse"),
        )
    ),
    *(
        Operation(
            "post",
            path,
            f"Unload a LoRA adapter, like {peer}; requests that run finish with it.",
            answer,
            (400, 403, 404, 413, *_WORKING),
            "UnloadLoraRequest",
            {"adapter": {"lora_name": "support"}},
            tag="LoRA",
        )
        for path, peer, answer in (
            ("/v1/unload_lora_adapter", "vLLM", "text/plain"),
            ("/unload_lora_adapter", "SGLang", "LoraResponse"),
        )
    ),
    Operation("get", "/health", "200 if the server accepts requests, else 503.", "Health", _WORKING, is_open=True),
    *(
        Operation(method, "/ping", "The same as /health, for SageMaker.", "Health", _WORKING, is_open=True)
        for method in ("get", "post")
    ),
    Operation(
        "get",
        "/health_generate",
        "Score one tiny request and report the time.",
        "HealthGenerate",
        (429, *_WORKING),
        is_open=True,
    ),
    Operation("get", "/info", "The served model, like Text Embeddings Inference.", "TeiInfo", _WORKING),
    Operation("get", "/server_info", "Configuration, versions, devices, memory, statistics.", "ServerInfo", (500,)),
    Operation("get", "/metrics", "Metrics for Prometheus.", "text/plain", (500,)),
    Operation("get", "/openapi.json", "This document.", "application/json", (500,), is_open=True),
    Operation("get", "/docs", "This document as a page.", "text/html", (404, 500), is_open=True),
    Operation("get", "/", "The playground.", "text/html", (500,), is_open=True),
    Operation("get", "/reports", "The report viewer.", "text/html", (500,), is_open=True, tag="Reports"),
    Operation(
        "get", "/reports/list", "The artifacts in the folder of reports.", "ReportList", (404, 500), tag="Reports"
    ),
    Operation(
        "get",
        "/reports/view",
        "An artifact as a page.",
        "text/html",
        (400, 404, 500),
        parameters=(_REPORT_NAME,),
        tag="Reports",
    ),
    Operation(
        "post",
        "/reports/view",
        "The artifact of the request body as a page.",
        "text/html",
        (400, 404, 413, 500),
        "Artifact",
        tag="Reports",
    ),
    Operation("get", "/page/{name}", "A file of the page.", "text/plain", (404, 500), is_open=True),
)
