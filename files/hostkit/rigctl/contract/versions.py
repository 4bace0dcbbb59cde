"""Versions of drivers, engines, compilers and kernels, as far as they are numbers."""

from __future__ import annotations

import re


def version_tuple(text: str | None) -> tuple[int, ...]:
    """(580, 159, 4) of "580.159.04", (0, 5, 10) of "0.5.10.post1"; () where no number leads."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()
