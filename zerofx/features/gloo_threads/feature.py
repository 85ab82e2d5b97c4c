"""What `zerofx.features.gloo_threads` adds to the core."""

from __future__ import annotations

from zerofx.features.gloo_threads.gloo_threads import batch_gloo_threads
from zerofx.features.interface import Feature

FEATURE = Feature(settled=(batch_gloo_threads,))
