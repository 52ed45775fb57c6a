"""Overlap reading with training: one buffer is filled while the other is used."""

from ._twinbuf import __version__
from .report import Report

__all__ = ["Report", "__version__"]
