"""What `zerofx.features.same_host` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import Feature
from zerofx.features.same_host.same_host import SameHost

FEATURE = Feature(shortcuts=(SameHost(),))
