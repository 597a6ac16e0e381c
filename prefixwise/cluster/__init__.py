"""Beyond one machine: a Ray Serve application for traffic, Ray Data for bulk. Ray itself is an extra.

    HTTP -> front (reads the query) -> router (picks the replica that has it cached) -> replica (the whole server app)

`routing`, `exchange`, `tickets` and `options` need no Ray. `benchmarks.cluster_simulation` runs the routing without a
cluster.
"""
