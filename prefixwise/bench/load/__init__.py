"""Load: open-loop and closed-loop traffic; latencies count from the intended send times."""
