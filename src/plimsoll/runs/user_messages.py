"""Warnings to the user from any thread, which never raise."""

import logging
import warnings

from plimsoll.text import printable

_LOG = logging.getLogger("plimsoll")


def warn_user(message: str) -> None:
    """Warn. Where warnings are errors (``-W error``) or cannot be shown, log instead."""
    message = printable(message, lines=False)
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Exception:  # noqa: BLE001  (watching never stops training: a filter or a closed stderr can raise anything)
        _LOG.warning("%s", message)
