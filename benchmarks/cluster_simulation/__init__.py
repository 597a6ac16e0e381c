"""A cluster in simulated time: which policy keeps prefixes where they are found, and what that is worth.

The routing (`itemwise.cluster.routing`), every replica's cache (`itemwise.engine.prefix_cache`) and the autoscaler's
arithmetic (`itemwise.cluster.scaling`) are the product's own; the device is a model of time (`device.py`), fitted to
what one H200 was measured at. Requests of one shape come at random (Poisson), their queries by a Zipf law. Each front
knows what it has sent and has not got back, and what the replicas said up to a second ago. The same seed gives the same
figures, to the last digit.

    python -m benchmarks.cluster_simulation [--only policies] [--output FILE]

Simulated cases, each a table: `policies` (the most items per second within a p99, by policy), `skew` (hot queries),
`loss` (a replica dies, and comes back empty), `fronts` (how much it costs that they do not know of each other),
`million` (a million items per second), `autoscale` (a burst). The last line is JSON.
"""
