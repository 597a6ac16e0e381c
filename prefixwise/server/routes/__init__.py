"""One module per group of routes; a route is a function from a `Call` to a response."""
