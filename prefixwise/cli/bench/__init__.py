"""`prefixwise bench`: benchmarks, their artifacts, comparisons and reports."""
