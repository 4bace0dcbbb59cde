"""How both programs compare what tools and the kernel show: versions, and values of settings."""

from __future__ import annotations

import re


def version_tuple(text: str | None) -> tuple[int, ...]:
    """(580, 159, 4) of "580.159.04", (0, 5, 10) of "0.5.10.post1"; () where no number leads."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def same_value(live: str | None, wanted: str | None) -> bool:
    """Equal as text, or as numbers in any notation: the driver shows 0x00 as 0."""
    if live == wanted:
        return True
    try:
        return int(live or "", 0) == int(wanted or "", 0)
    except ValueError:
        return False
