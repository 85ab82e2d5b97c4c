"""What `zerofx.features.one_copy` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import Feature
from zerofx.features.one_copy.one_copy import InCommon

FEATURE = Feature(options=("one_copy",), weights=(InCommon,))
