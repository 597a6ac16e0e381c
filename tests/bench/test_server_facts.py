"""The server's configuration: reported, declared, and where the two disagree."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwise.bench.server_facts import (
    contradictions,
    is_contradiction,
    lasting_config,
    served_names,
    server_config,
    server_summary,
    without_secrets,
)

OURS: dict[str, Any] = {
    "status": "ready",
    "configuration": {"port": 8000, "chunk_size": 64, "mask": "auto", "segment_fallback_threshold": 32768},
    "devices": {"backend": "jax"},
}


THEIRS: dict[str, Any] = {
    "model_path": "Qwen/Qwen3-0.6B",
    "multi_item_mask_impl": "dense",
    "api_key": "hush",
    "port": 30010,
    "internal_states": [{"last_gen_throughput": 12.5}],
}


DECLARED = {
    "multi_item_scoring_chunk_size": 64,
    "multi_item_mask_impl": "auto",
    "multi_item_segment_fallback_threshold": 32768,
}


def test_what_our_server_says_and_what_is_declared_stand_side_by_side() -> None:
    config = server_config(OURS, DECLARED, "http://here")
    assert config == {**OURS["configuration"], **DECLARED, "declared": DECLARED, "base_url": "http://here"}


def test_a_server_is_one_line_of_what_it_says() -> None:
    ours = {"model": {"name": "m"}, "devices": {"backend": "torch", "device": "cpu", "dtype": "float32"}, "stats": {}}
    assert server_summary(ours) == "m, torch, cpu, float32"
    assert server_summary(THEIRS) == "Qwen/Qwen3-0.6B"
    assert server_summary({"version": 7}) == "its model and device are not reported"


def test_of_others_the_figures_and_secrets_are_left_out_and_their_word_counts() -> None:
    config = server_config(THEIRS, DECLARED, "http://here")
    assert config["multi_item_mask_impl"] == "dense"
    assert config["declared"] == DECLARED
    assert config["multi_item_scoring_chunk_size"] == 64
    assert "hush" not in str(config)
    assert not {"api_key", "internal_states"} & set(config)


@pytest.mark.parametrize(
    "name",
    ["api_key", "admin_api_key", "apiKey", "ssl_keyfile_password", "hf_token", "auth_token", "token", "client_secret"],
)
def test_secrets_are_left_out_at_any_depth(name: str) -> None:
    reported = {"a": 1, "args": [{"deep": {name: "hush", "b": 2}}]}
    assert without_secrets(reported) == {"a": 1, "args": [{"deep": {"b": 2}}]}
    config = server_config({"configuration": reported}, {}, "http://here")
    assert "hush" not in str(config)


def test_tokens_that_are_no_secrets_stay() -> None:
    reported = {
        "delimiter_token_id": 151643,
        "label_token_ids": [1, 2],
        "max_tokens": 5,
        "eos_token": "</s>",
        "tokenizer_path": "here",
        "ssl_keyfile": "key.pem",
    }
    assert without_secrets(reported) == reported


def test_where_it_listens_does_not_last() -> None:
    lasting = lasting_config(server_config(THEIRS, {}, "http://here"))
    assert lasting == {"model_path": "Qwen/Qwen3-0.6B", "multi_item_mask_impl": "dense", "declared": {}}


def test_who_agrees_does_not_contradict() -> None:
    assert contradictions(OURS, DECLARED, "jax", "m", ["m", "n"]) == []
    assert contradictions({}, DECLARED, "jax", "m", []) == []


def test_every_contradiction_is_a_sentence_by_the_name_that_the_server_has_for_it() -> None:
    declared = {**DECLARED, "multi_item_scoring_chunk_size": 500}
    assert contradictions(OURS, declared, "pytorch", "m", ["n"]) == [
        "declared multi_item_scoring_chunk_size = 500, but the server says chunk_size = 64",
        "declared backend = pytorch, but the server says backend = jax",
        "the workload was made for m, but the server has n",
    ]
    assert contradictions(THEIRS, DECLARED, "jax", "m", []) == [
        "declared multi_item_mask_impl = auto, but the server says multi_item_mask_impl = dense"
    ]


def test_a_delimiter_is_known_by_both_names() -> None:
    declared = {"multi_item_scoring_delimiter": 7}
    of_ours, of_theirs = {"configuration": {"delimiter_token_id": None}}, {"multi_item_scoring_delimiter": 8}
    assert contradictions(of_ours, declared, "jax", "m", []) == [
        "declared multi_item_scoring_delimiter = 7, but the server says delimiter_token_id = None"
    ]
    assert contradictions(of_theirs, declared, "jax", "m", []) == [
        "declared multi_item_scoring_delimiter = 7, but the server says multi_item_scoring_delimiter = 8"
    ]


def test_a_contradiction_is_known_from_other_notes() -> None:
    found = contradictions(OURS, {**DECLARED, "multi_item_scoring_chunk_size": 500}, "pytorch", "m", ["n"])
    assert [is_contradiction(note) for note in found] == [True, True, True]
    assert not is_contradiction("JAX portable run")


def test_our_own_word_for_pytorch_is_torch() -> None:
    assert contradictions({"devices": {"backend": "torch"}}, {}, "pytorch", "m", []) == []


def test_served_names() -> None:
    assert served_names({"data": [{"id": "a"}, {"id": "b"}]}) == ["a", "b"]
    assert served_names({}) == served_names({"data": None}) == []
