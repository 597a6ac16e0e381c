"""Beyond one machine: a Ray Serve application for traffic, Ray Data for bulk. Ray itself is an extra.

    HTTP -> front (which query is it?) -> router (which replica has it?) -> replica (one server's whole app)

What needs no Ray is pure and stands in files of its own: `routing`, `request_key`, `exchange`, `metrics_text`,
`scaling`, `workers`. `benchmarks.cluster_simulation` runs them without a cluster.
"""
