"""Docstrings for the reference: reStructuredText's ``::`` in front of code is no Markdown, so it goes."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Plain(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^::$", "", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
