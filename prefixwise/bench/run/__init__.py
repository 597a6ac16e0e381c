"""What executes: workloads, sweeps, comparisons, validation, load, checks, reports."""
