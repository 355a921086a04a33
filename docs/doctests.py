"""An extension of the reference's generator: the doctests of a docstring become code blocks.

Docstrings here have their examples as plain paragraphs of ``>>>`` lines, which Markdown would take for quotations.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences each doctest."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
