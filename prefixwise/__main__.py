"""`python -m prefixwise` is the same program as `prefixwise`."""

from __future__ import annotations

from prefixwise.cli.main import main

if __name__ == "__main__":
    main()
