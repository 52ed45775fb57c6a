"""Builds the package by maturin, and says in one line what is missing where there is no Rust."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import maturin
from maturin import build_sdist, get_requires_for_build_sdist  # noqa: F401


def _with_rust(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Check for Rust first: without it maturin would download a compiler, or fail in many lines."""

    @functools.wraps(hook)
    def checked(*arguments: Any, **options: Any) -> Any:
        if shutil.which("cargo") is None:
            sys.exit(
                "twinbuf: no wheel fits this system, and building one needs Rust 1.85 or later: https://rustup.rs"
            )
        return hook(*arguments, **options)

    return checked


get_requires_for_build_wheel = _with_rust(maturin.get_requires_for_build_wheel)
get_requires_for_build_editable = _with_rust(maturin.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _with_rust(maturin.prepare_metadata_for_build_wheel)
build_wheel = _with_rust(maturin.build_wheel)
build_editable = _with_rust(maturin.build_editable)
