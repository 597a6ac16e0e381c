"""One file per API that scores: how its JSON asks, and how it answers. One engine is behind all of them."""
