"""The HTTP server: middleware, routes and dialects around one engine. `scoring.py` is the path of a scoring request."""
