"""`itemwise bench`: benchmarks, their artifacts, comparisons and reports."""
