"""Builds the package by maturin, and says what is missing where there is no Rust."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import maturin
from maturin import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    """Return what maturin needs. Without Rust it would download a compiler."""
    if shutil.which("cargo") is None:
        sys.exit(
            "twinbuf: there is no wheel for this system, and to build one needs Rust 1.85 or later: https://rustup.rs"
        )
    required: list[str] = maturin.get_requires_for_build_wheel(settings)
    return required


get_requires_for_build_editable = get_requires_for_build_wheel
