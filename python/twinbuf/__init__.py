"""Overlap reading with training: one buffer is filled while the other is used."""

from ._prefetch import Prefetcher, prefetch
from ._twinbuf import __version__
from .report import Report

__all__ = ["Prefetcher", "Report", "__version__", "prefetch"]
