"""`python -m prefixwise.launch_server ARGS` is `prefixwise serve ARGS`, as SGLang's command lines have it."""

from __future__ import annotations

import sys

from prefixwise.__main__ import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
