"""The HTTP server: requests come in here, walk the data path through `engine`, and leave as JSON."""
