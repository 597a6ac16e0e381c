"""`python -m itemwise.launch_server ARGS` is `itemwise serve ARGS`, so that SGLang's command lines keep their shape."""

from __future__ import annotations

import sys

from itemwise.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
