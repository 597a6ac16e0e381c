"""`python -m itemwise` is the same program as `itemwise`."""

from __future__ import annotations

from itemwise.cli.main import main

if __name__ == "__main__":
    main()
