"""`prefixwise validate`: evaluations of a server, combined and judged."""
