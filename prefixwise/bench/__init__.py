"""Harness: validation and benchmarks over HTTP, against any server that speaks `/v1/score`. It makes artifacts."""
