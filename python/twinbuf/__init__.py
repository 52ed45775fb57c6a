"""Overlap reading with training: one buffer is filled while the other is used."""

from ._prefetch import Prefetcher, prefetch
from ._twinbuf import __version__
from ._watch import Watched, watch
from .report import Report

__all__ = ["Prefetcher", "Report", "Watched", "__version__", "prefetch", "watch"]
