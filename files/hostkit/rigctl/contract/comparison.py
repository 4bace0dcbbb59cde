"""How both programs compare what tools and the kernel show: versions, and values of settings."""

import re


def version_tuple(text: str | None) -> tuple[int, ...]:
    """(580, 159, 4) of "580.159.04", (0, 5, 10) of "0.5.10.post1"; () where no number leads."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def key_values(text: str) -> dict[str, str]:
    """{"A": "1"} of "A=1;B": how the NVIDIA driver takes registry keys, in any order."""
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return {name.strip(): value.strip() for name, equal, value in pairs if equal}


def same_value(live: str | None, wanted: str | None) -> bool:
    """Equal as text, or as numbers in any notation: the driver shows 0x00 as 0.

    Of several keys ("A=1;B=2") the live value must hold the wanted ones: their order, and further keys, do not matter.
    """
    if live == wanted:
        return True
    if keys := key_values(wanted or ""):
        there = key_values(live or "")
        return all(name in there and same_value(there[name], value) for name, value in keys.items())
    try:
        return int(live or "", 0) == int(wanted or "", 0)
    except ValueError:
        return False
