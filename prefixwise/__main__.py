"""The program `prefixwise`, also as `python -m prefixwise`. Imports nothing of it before an interrupt is handled."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> None:
    """Run the program and exit with its status; `args` are `sys.argv[1:]` unless given.

    Ctrl-C during the imports, which take half a second, ends it without a trace; there is nothing to clean up.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # the caller does not ignore it
    if interruptible:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    from prefixwise.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run(args)


if __name__ == "__main__":
    main()
