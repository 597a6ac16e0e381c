"""From options to a running engine: options, loading, warm-up."""
