from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from prefixwise.cluster.metrics_text import merge_metrics
from prefixwise.server.metrics import Metrics


def page(requests: int) -> str:
    metrics = Metrics()
    for _ in range(requests):
        metrics.count_request("/v1/score", 200, 0.01)
    return metrics.render().decode()


def test_every_sample_says_whose_it_is_and_none_is_lost() -> None:
    merged = merge_metrics({"a": page(2), "b": page(3)})
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = [
        (sample.labels["replica"], sample.value)
        for sample in families["prefixwise:requests"].samples
        if sample.name == "prefixwise:requests_total"
    ]
    assert samples == [("a", 2.0), ("b", 3.0)]


def test_each_family_is_described_once() -> None:
    merged = merge_metrics({"a": page(1), "b": page(1)})
    described = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described)) == sum(line.startswith("# TYPE") for line in page(1).splitlines())


def test_labels_may_hold_anything() -> None:
    merged = merge_metrics({"a": '# TYPE x counter\nx_total{path="a} b",other="\\"q\\" "} 3 1.5e9\nx_bare 4\n'})
    assert 'x_total{replica="a",path="a} b",other="\\"q\\" "} 3 1.5e9' in merged
    assert 'x_bare{replica="a"} 4' in merged
