"""A cluster in simulated time: compares routing policies by the cache hits and the latency they give.

The routing (`prefixwise.cluster.routing`), every replica's KV cache (`prefixwise.engine.prefix_cache`) and the
autoscaler's arithmetic (`prefixwise.cluster.routing`) are the product's own. The device is a model of time
(`device.py`), fitted to measurements on one H200. Requests of one shape arrive at random (Poisson), their
queries follow a Zipf law. Each front knows the requests it has in flight and the replicas' state of up to a second ago.
The same seed gives the same figures, to the last digit.

    python -m benchmarks.cluster_simulation [--only policies] [--output FILE]

Simulated cases, each a table: `policies` (the most items per second within a p99, by policy), `skew` (hot queries),
`loss` (a replica dies, and comes back empty), `fronts` (how much it costs that they do not know of each other),
`million` (a million items per second), `autoscale` (a burst). The last line is JSON.
"""
