"""One valid artifact of every kind, with metrics one can check in one's head, and ways to spoil it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefixwise.bench.run.check import FileReport, check_file

Document = dict[str, Any]
GONE = object()  # for `edited`: take the field away

WORKLOAD_NAME = "canonical_workload.json"
# SHA-256 of the request below as compact JSON with sorted keys, by `sha256sum`.
REQUEST_SHA256 = "98b9864262dd5a95704ee603407a0e00ddc1851a9fdc05ecc41ba6d83e4f614a"


def workload() -> Document:
    """Two items of two tokens; ids below 10 are all there are, 0 is special, 1 the delimiter."""
    request = {
        "request_id": "canonical_score_request_000",
        "query_token_ids": [7, 8, 9],
        "items_token_ids": [[4, 5], [6, 7]],
        "label_token_ids": [2, 3],
        "apply_softmax": True,
        "item_first": False,
    }
    return {
        "schema_version": "canonical_score_workload_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "model": "tiny",
        "query_tokens": 3,
        "num_items": 2,
        "item_tokens": 2,
        "delimiter_token_id": 1,
        "label_token_ids": [2, 3],
        "tokenizer": {"name_or_path": "tiny", "vocab_size": 10, "special_token_ids": [0]},
        "safe_token_pool": [2, 3, 4, 5, 6, 7, 8, 9],
        "requests": [request],
        "checksums": {"canonical_score_request_000_sha256": REQUEST_SHA256},
    }


def _good_run(index: int, total_ms: float, calls: list[float]) -> Document:
    return {
        "run_index": index,
        "ok": True,
        "total_e2e_ms": total_ms,
        "call_latencies_ms": calls,
        "failure_reason": None,
        "failure_detail": None,
    }


def _good_row() -> Document:
    """Two items, one by one; runs of 100, 110 and 150 ms."""
    return {
        "client_chunk_size": 1,
        "num_chunks": 2,
        "timed_runs": 3,
        "successful_runs": 3,
        "success_rate": 1.0,
        "status": "ok",
        "p50_total_e2e_ms": 110.0,
        "p95_total_e2e_ms": 146.0,  # place 1.9 of 100 110 150
        "mean_total_e2e_ms": 120.0,
        "mean_chunk_call_ms": 60.0,
        "p95_chunk_call_ms": 80.0,  # place 4.75 of 40 50 50 60 80 80
        "throughput_items_sec": 2 / 0.120,
        "first_run_penalty_ratio": 100 / 130,
        "failure_reason_counts": {},
        "usd_per_run": 0.5,
        "items_per_usd": 4.0,
        "reference_scores": [[0.25, 0.75], [0.5, 0.5]],
        "run_records": [
            _good_run(0, 100.0, [50.0, 50.0]),
            _good_run(1, 110.0, [80.0, 40.0]),
            _good_run(2, 150.0, [80.0, 60.0]),
        ],
    }


def _failing_row() -> Document:
    """Both items at once; one run of two came too late."""
    late: Document = {
        "run_index": 1,
        "ok": False,
        "total_e2e_ms": None,
        "call_latencies_ms": [],
        "failure_reason": "timeout",
        "failure_detail": "too late",
    }
    return {
        "client_chunk_size": 2,
        "num_chunks": 1,
        "timed_runs": 2,
        "successful_runs": 1,
        "success_rate": 0.5,
        "status": "partial_failure",
        "p50_total_e2e_ms": 50.0,
        "p95_total_e2e_ms": 50.0,
        "mean_total_e2e_ms": 50.0,
        "mean_chunk_call_ms": 50.0,
        "p95_chunk_call_ms": 50.0,
        "throughput_items_sec": 40.0,
        "first_run_penalty_ratio": None,
        "failure_reason_counts": {"timeout": 1},
        "usd_per_run": None,
        "items_per_usd": None,
        "reference_scores": [[0.25, 0.75], [0.5, 0.5]],
        "run_records": [_good_run(0, 50.0, [50.0]), late],
    }


def score_matrix() -> Document:
    """Chunk 1 works, chunk 2 does not always: 1 is recommended, though 2 is faster."""
    metrics = ("client_chunk_size", "throughput_items_sec", "p95_total_e2e_ms", "success_rate")
    choice = {
        "eligible_count": 1,
        "guardrail_ratio": 1.25,
        "guardrail_p95_ms": 146.0 * 1.25,
        "selected": {name: _good_row()[name] for name in metrics},
        "notes": [],
    }
    return {
        "schema_version": "score_matrix_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "backend": "jax",
        "evaluation_view": "portable",
        "hardware": {"accelerator": "TPU v6e"},
        "server_config": {"model": "tiny"},
        "workload_ref": {
            "path": f"somewhere/else/{WORKLOAD_NAME}",
            "sha256": REQUEST_SHA256,
            "request_id": "canonical_score_request_000",
        },
        "workload": {
            "model": "tiny",
            "query_tokens": 3,
            "num_items": 2,
            "item_tokens": 2,
            "label_token_ids": [2, 3],
        },
        "results": [_good_row(), _failing_row()],
        "confirm_results": [_good_row()],
        "summary": {
            "guardrail_ratio": 1.25,
            "sweep_recommendation": choice,
            "confirm_chunk_sizes": [1],
            "confirm_recommendation": choice,
            "final_recommendation": choice,
            "correctness_thresholds": {"max_abs_diff": 0.02, "mean_abs_diff": 0.01},
        },
        "notes": [],
    }


def ops_chunk() -> Document:
    return {
        "chunk_size": 64,
        "throughput_items_per_sec": 79.5,
        "latency_p50_ms": 100.0,
        "latency_p99_ms": 120.0,
        "memory_peak_mb": None,
        "status": "ok",
        "error": None,
    }


def ops_matrix() -> Document:
    """The example of the handoff document, with three rows."""
    slow = {**ops_chunk(), "chunk_size": 32, "throughput_items_per_sec": 50.0}
    metrics = ("throughput_items_per_sec", "latency_p50_ms", "latency_p99_ms")
    failed = {**ops_chunk(), "chunk_size": 500, "status": "failed", "error": "out of memory", **dict.fromkeys(metrics)}
    return {
        "schema_version": "1.0",
        "backend": "jax",
        "hardware": "tpu-v6e-1",
        "server_config": {
            "model": "Qwen/Qwen3-0.6B",
            "multi_item_mask_impl": "dense",
            "multi_item_segment_fallback_threshold": 0,
        },
        "workload_ref": "canonical-2000-500-20",
        "results": [slow, ops_chunk(), failed],
        "summary": {
            "best_chunk_size": 64,
            "best_throughput": 79.5,
            "total_configs_tested": 3,
            "successful_configs": 2,
        },
    }


def ops_run_metadata() -> Document:
    return {
        "schema_version": "1.0",
        "run_id": "20260212T120000Z",
        "backend": "jax",
        "hardware": "tpu-v6e-1",
        "model": "Qwen/Qwen3-0.6B",
        "workload": {"query_tokens": 2000, "num_items": 500, "item_tokens": 20, "label_token_ids": [9454, 2753]},
        "server_config": {"multi_item_mask_impl": "dense", "multi_item_segment_fallback_threshold": 0},
        "chunk_sizes": [32, 64, 500],
        "timestamp_start": "2026-02-12T12:00:00Z",
    }


def _gate(largest: float, average: float, passes: bool) -> Document:
    return {
        "status": "ok",
        "max_abs_diff": largest,
        "mean_abs_diff": average,
        "num_compared": 4,
        "pass": passes,
        "detail": None,
    }


def _quote(size: int, throughput: float, p95: float) -> Document:
    metrics = {"success_rate": 1.0, "throughput_items_sec": throughput, "p95_total_e2e_ms": p95}
    return {"client_chunk_size": size, **metrics}


def _best(backend: str, quote: Document) -> Document:
    row = {name: quote[name] for name in ("client_chunk_size", "throughput_items_sec", "p95_total_e2e_ms")}
    bounds = {"eligible_count": 1, "guardrail_ratio": 1.25, "guardrail_p95_ms": 1.25 * quote["p95_total_e2e_ms"]}
    return {**bounds, "winner": {"backend": backend, **row}}


def comparison() -> Document:
    """Chunk 1 is at both bounds, chunk 2 was measured by one backend alone: JAX is twice as fast."""
    jax, pytorch, alone = _quote(1, 40.0, 50.0), _quote(1, 20.0, 100.0), _quote(2, 80.0, 25.0)
    deltas = {"throughput_items_sec": 20.0, "throughput_items_sec_pct": 100.0, "p95_total_e2e_ms": -50.0}
    nothing = {**_gate(0.0, 0.0, False), "max_abs_diff": None, "mean_abs_diff": None, "num_compared": 0}
    return {
        "schema_version": "cross_backend_comparison_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "portable_view": {
            "guardrail_ratio": 1.25,
            "rows": [
                {
                    "client_chunk_size": 1,
                    "jax": jax,
                    "pytorch": pytorch,
                    "correctness": _gate(0.02, 0.01, True),
                    "deltas": deltas,
                },
                {"client_chunk_size": 2, "jax": alone, "pytorch": None, "correctness": nothing},
            ],
            "backend_best": {"jax": _best("jax", jax), "pytorch": _best("pytorch", pytorch)},
            "winner": {**_best("jax", jax), "eligible_count": 2, "tie": False, "ratio": 2.0, "deltas": deltas},
        },
        "best_native_view": {
            "guardrail_ratio": 1.25,
            "jax_selected": jax,
            "pytorch_selected": pytorch,
            "correctness": _gate(0.0, 0.0, True),
            "winner": {**_best("jax", jax), "eligible_count": 2, "tie": False, "ratio": 2.0},
        },
        "correctness": {"thresholds": {"max_abs_diff": 0.02, "mean_abs_diff": 0.01}},
        "recommendations": {"portable": "jax", "best_native": "jax", "overall": "jax"},
        "notes": [],
        "inputs": {"jax_portable_json": "jax_portable_matrix.json"},
    }


def endpoint_evaluation() -> Document:
    """Three items; the second is changed, and the third moves by 1/8 and by 1/4."""

    def mutation(other: list[int], moved: float) -> Document:
        return {
            "mutated_index": 1,
            "mutated_item_ids": other,
            "scores": [[0.5, 0.5], [0.125, 0.875], [0.5 + moved, 0.5 - moved]],
            "unchanged_item_abs_diffs": [0.0, moved],
            "max_abs_diff_unchanged": moved,
            "mean_abs_diff_unchanged": moved / 2,
        }

    return {
        "mode": "serial",
        "url": "http://127.0.0.1:30011/v1/score",
        "model": "tiny",
        "labels": [2, 3],
        "delimiter": 1,
        "isolation": {
            "query_ids": [7, 8],
            "item_ids": [[4], [5], [6]],
            "base_scores": [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]],
            "same_length_mutation": mutation([9], 0.125),
            "changed_length_mutation": mutation([9, 9], 0.25),
        },
        "performance": {
            "8": {
                "latencies_sec": [0.25, 0.5],
                "p50_sec": 0.375,
                "p95_sec": 0.4875,
                "items_per_sec_p50": 8 / 0.375,
                "items_per_sec_p95": 8 / 0.4875,
            }
        },
        "semantic_alignment": {
            "query_plus_delimiter_ids": [7, 8, 1],
            "base_scores_query_plus_delimiter": [[0.5, 0.5], [0.25, 0.75], [0.75, 0.25]],
        },
    }


def multi_vs_serial() -> Document:
    return {
        "model": "tiny",
        "multi_url": "http://127.0.0.1:30010",
        "serial_url": "http://127.0.0.1:30011",
        "labels": [2, 3],
        "equivalence": {
            "abs_diffs_multi_vs_serial": [0.25, 0.125],
            "max_abs_diff": 0.25,
            "mean_abs_diff": 0.1875,
            "multi_scores": [[0.5, 0.5], [0.25, 0.75]],
            "serial_scores": [[0.75, 0.25], [0.125, 0.875]],
        },
        "equivalence_query_plus_delimiter": {
            "abs_diffs_multi_vs_serial_query_plus_delimiter": [0.0, 0.0],
            "max_abs_diff": 0.0,
            "mean_abs_diff": 0.0,
            "serial_query_plus_delimiter_scores": [[0.5, 0.5], [0.25, 0.75]],
        },
        "isolation": {
            "same_length_mutation_unchanged_diffs": [0.0],
            "same_length_mutation_max_abs_diff": 0.0,
            "changed_length_mutation_unchanged_diffs": [0.0],
            "changed_length_mutation_max_abs_diff": 0.0,
        },
        "performance": {
            "32": {
                "multi_p50_sec": 0.5,
                "multi_p95_sec": 0.5,
                "serial_p50_sec": 2.0,
                "serial_p95_sec": 2.0,
                "speedup_vs_serial_p50": 4.0,
                "multi_items_per_sec_p50": 64.0,
                "serial_items_per_sec_p50": 16.0,
                "multi_latencies_sec": [0.5],
                "serial_latencies_sec": [2.0],
            }
        },
    }


def parity() -> Document:
    return {
        "model": "tiny",
        "delimiter": 1,
        "labels": [2, 3],
        "query_ids": [7, 8],
        "item_ids": [[4]],
        "max_abs_diff_jax_serial_vs_torch_serial": 0.0,
        "max_abs_diff_jax_multi_vs_torch_serial": 0.25,
        "max_abs_diff_jax_multi_vs_torch_multi_semantic": 0.0,
        "jax_serial_scores": [[0.5, 0.5]],
        "jax_multi_scores": [[0.25, 0.75]],
        "torch_serial_reference_scores": [[0.5, 0.5]],
        "torch_multi_semantic_reference_scores": [[0.25, 0.75]],
        "abs_diff_jax_serial_vs_torch_serial": [0.0],
        "abs_diff_jax_multi_vs_torch_serial": [0.25],
        "abs_diff_jax_multi_vs_torch_multi_semantic": [0.0],
    }


def gate_report() -> Document:
    """All at their bounds."""

    def gate(field: str, value: float, comparison: str = "<=") -> Document:
        return {
            "field": field,
            "value": value,
            "comparison": comparison,
            "bound": value,
            "pass": True,
            "detail": None,
        }

    checks = {
        "same_length_isolation_zero": gate("same length", 0.0),
        "changed_length_isolation_zero": gate("changed length", 0.0),
        "delimiter_aligned_equiv_le_0p02": gate("equivalence", 0.02),
        "speedup_n32_ge_3x": gate("speedup", 3.0, ">="),
        "jax_serial_vs_torch_serial_le_0p02": gate("parity", 0.02),
    }
    return {"checks": checks, "all_pass": True}


def model_matrix() -> Document:
    failed = {"model": "large", "status": "error", "reason": "out of memory"}
    return {
        "schema_version": "model_matrix_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "models": ["tiny", "large"],
        "rows": [{"model": "tiny", "status": "pass", "reason": None, "gate": gate_report()}, failed],
        "all_pass": False,
    }


def quantization() -> Document:
    """Three items; the two best change places, by a quarter each. Of equal scores the first label counts."""

    def gate(field: str, value: float, bound: float, comparison: str = "<=") -> Document:
        common = {"field": field, "value": value, "comparison": comparison, "bound": bound}
        return {**common, "pass": True, "detail": None}

    request = {
        "request_id": "line 1",
        "scores": [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]],
        "reference_scores": [[0.5, 0.5], [0.75, 0.25], [0.25, 0.75]],
    }
    metrics = {
        "max_abs_diff": 0.25,
        "mean_abs_diff": 1 / 6,
        "rank_correlation": 0.5,
        "least_rank_correlation": 0.5,
        "top_1_agreement": 0.0,
        "top_10_agreement": 1.0,
        "changed_labels": 0.0,
    }
    return {
        "schema_version": "score_quantization_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "model": "tiny-fp8",
        "reference": "tiny",
        "workload": "requests.jsonl",
        "model_server": {"checkpoint_quantization": "fp8 (e4m3, blocks of 128 x 128)", "dtype": "bfloat16"},
        "reference_server": {"checkpoint_quantization": None, "dtype": "bfloat16"},
        "metrics": metrics,
        "checks": {
            "max_abs_diff": gate("max_abs_diff", 0.25, 0.5),
            "mean_abs_diff": gate("mean_abs_diff", 1 / 6, 0.25),
            "rank_correlation": gate("rank_correlation", 0.5, 0.25, ">="),
            "top_1_agreement": gate("top_1_agreement", 0.0, 0.0, ">="),
            "top_10_agreement": gate("top_10_agreement", 1.0, 0.5, ">="),
            "changed_labels": gate("changed_labels", 0.0, 0.5),
        },
        "all_pass": True,
        "requests": [request],
    }


def _geometry() -> Document:
    return {
        "query_tokens": 300,
        "num_items": 10,
        "item_tokens": 20,
        "label_token_ids": [2],
        "vocab_size": 10,
        "distinct_queries": 0,
    }


def load() -> Document:
    """In two seconds five arrivals: one dropped, one failed, three answered."""
    spread = {"p50_ms": 10.0, "p95_ms": 19.0, "p99_ms": 19.8, "max_ms": 20.0, "mean_ms": 13.0}
    phase = {
        "arrivals": 5,
        "sent": 4,
        "dropped": 1,
        "answered": 3,
        "errors_by_code": {"timeout": 1},
        "send_sec": 2.0,
        "wall_sec": 2.0,
        "qps_offered": 2.5,
        "qps_sent": 2.0,
        "qps_answered": 1.5,
        "items_per_sec": 15.0,
        "latency": spread,
        "service_latency": spread,
        "sender_late": None,
        "goodput": None,
    }
    return {
        "schema_version": "score_load_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "url": "http://127.0.0.1:30000",
        "server_config": {},
        "geometry": _geometry(),
        "mode": "open",
        "rate_qps": 2.5,
        "concurrency": None,
        "seed": 0,
        "timeout_sec": 1.0,
        "max_in_flight": 1,
        "client_overhead": spread,
        "warmup": None,
        "measured": phase,
        "rate_search": [],
        "notes": [],
    }


def ab() -> Document:
    """Runs of 250 and 750 ms; the second variant failed."""
    first = {
        "name": "packed",
        "server_flags": [],
        "request_fields": {},
        "server_config": {},
        "status": "ok",
        "failure": None,
        "median_ms": 500.0,
        "p95_ms": 725.0,
        "items_per_sec": 20.0,
        "speed_vs_first": None,
        "scores_vs_first": {"max_abs_diff": 0.0, "mean_abs_diff": 0.0, "num_compared": 10},
        "scores_agree": True,
        "runs": [
            {"round_index": 0, "place": 0, "seconds": 0.25},
            {"round_index": 1, "place": 1, "seconds": 0.75},
        ],
    }
    nothing = dict.fromkeys(("median_ms", "p95_ms", "items_per_sec", "scores_vs_first"))
    failed = {"name": "serial", "status": "failed", "failure": "timeout", "scores_agree": False, "runs": []}
    return {
        "schema_version": "score_ab_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "model": None,
        "compare": "algorithm",
        "geometry": _geometry(),
        "cached": False,
        "rounds": 2,
        "runs_per_round": 1,
        "warmup_runs": 1,
        "seed": 0,
        "correctness_thresholds": {"max_abs_diff": 0.02, "mean_abs_diff": 0.01},
        "variants": [first, {**first, **nothing, **failed}],
        "notes": [],
    }


def self_check() -> Document:
    done = {"title": "workload", "command": "prefixwise bench workload", "status": 0, "seconds": 0.5, "detail": None}
    return {
        "schema_version": "score_self_check_v1",
        "generated_at_utc": "2026-02-11T12:00:00Z",
        "model": "embedded",
        "backends": ["jax", "torch"],
        "steps": [done, {**done, "title": "gate", "status": 1, "detail": "too slow"}],
        "all_pass": False,
    }


# By the name of the kind: a file's name, and what is in it.
SAMPLES: dict[str, tuple[str, Callable[[], Document]]] = {
    "workload": (WORKLOAD_NAME, workload),
    "score-matrix": ("jax_portable_matrix.json", score_matrix),
    "ops-matrix": ("matrix_results.json", ops_matrix),
    "ops-chunk": ("chunk_64.json", ops_chunk),
    "ops-run-metadata": ("run_metadata.json", ops_run_metadata),
    "comparison": ("comparison.json", comparison),
    "endpoint-evaluation": ("serial_score_eval_results.json", endpoint_evaluation),
    "multi-vs-serial": ("multi_vs_serial_eval_results.json", multi_vs_serial),
    "parity": ("jax_torch_parity_results.json", parity),
    "gate-report": ("gate.json", gate_report),
    "model-matrix": ("models.json", model_matrix),
    "quantization": ("quantization.json", quantization),
    "load": ("load.json", load),
    "ab": ("ab.json", ab),
    "self-check": ("self_check.json", self_check),
}


def write_all(folder: Path) -> Path:
    """Every sample, under its usual name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SAMPLES.values():
        (folder / name).write_text(json.dumps(make()))
    return folder


def edited(document: Document, **changes: object) -> Document:
    """A copy in which fields like `results__0__status` have other values."""
    result: Document = json.loads(json.dumps(document))
    for field, value in changes.items():
        *path, last = (int(part) if part.isdecimal() else part for part in field.split("__"))
        place: Any = result
        for part in path:
            place = place[part if isinstance(place, list) else str(part)]
        if value is GONE:
            del place[last]
        else:
            place[last if isinstance(place, list) else str(last)] = value
    return result


def check(folder: Path, kind: str, **changes: object) -> FileReport:
    """What is found in the sample of this kind, with these changes; the workload lies beside it."""
    (folder / WORKLOAD_NAME).write_text(json.dumps(workload()))
    name, make = SAMPLES[kind]
    (folder / name).write_text(json.dumps(edited(make(), **changes)))
    return check_file(folder / name)


def reported(report: FileReport, pattern: str = "") -> list[str]:
    """The errors that match, in words."""
    return [str(error) for error in report.errors if re.search(pattern, str(error))]


def warned(report: FileReport) -> list[str]:
    return [str(warning) for warning in report.warnings]
