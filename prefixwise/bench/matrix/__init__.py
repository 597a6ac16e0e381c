"""Matrix: a sweep over the client's chunk sizes, against one server."""
