"""The settings of clients, checked before anything is sent."""

from __future__ import annotations

from prefixwise.contract.errors import ClientSettingError, describe

_MOST_TIMEOUT_SEC = 1e6  # sockets take no more than a few weeks


def check_timeout(timeout_sec: object) -> None:
    """Raises ClientSettingError."""
    if not isinstance(timeout_sec, int | float) or isinstance(timeout_sec, bool):
        raise ClientSettingError(f"expected a time limit as a number of seconds, got {describe(timeout_sec)}")
    if not 0 < timeout_sec <= _MOST_TIMEOUT_SEC:  # what is not a number is neither
        raise ClientSettingError(f"expected a time limit above 0 and up to 1,000,000 seconds, got {timeout_sec:g}")


def check_api_key(api_key: object) -> None:
    """Raises ClientSettingError, whose message does not contain the key."""
    if api_key is not None and not isinstance(api_key, str):
        raise ClientSettingError(f"expected an API key as a string, got {type(api_key).__name__}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ClientSettingError("expected an API key of printable ASCII characters, as HTTP headers take no others")
