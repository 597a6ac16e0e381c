"""From a command line to a running engine: options, loading, warm-up."""
