"""Kinds of values that orders and catalogue entries share."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints


def host_path(path: str) -> str:
    """A path that scripts, our record on the host and systemd take as it is. Raises ValueError for any other."""
    parts = path.split("/")[1:]
    if not path.startswith("/") or {"", ".", ".."} & set(parts):
        raise ValueError("a path is absolute, is not / itself, and has no empty part, '.' or '..'")
    if not path.isprintable() or set(path) & set("|\\{}") or any(part != part.strip() for part in parts):
        raise ValueError("a path has no '|', '\\', braces or control characters, and no space around a part")
    return path


def _place(value: object) -> Path:
    if isinstance(value, str):
        return Path(host_path(value))
    if isinstance(value, Path):
        return value
    raise ValueError("a path is a text")


def _no_secret(text: str) -> str:
    parts = urlsplit(text)
    if parts.password or ("@" in parts.netloc and parts.scheme in ("http", "https")):
        raise ValueError("an address has no password or token: it would be readable by all")
    if text.startswith("-") or not text.isprintable():
        raise ValueError("an address begins with no '-' and has no control characters")
    return text


def ip_address(text: str) -> str:
    """An IP address without a zone. Raises ValueError for any other text."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("not an IP address") from None
    if "%" in text:
        raise ValueError("an address with a zone (%) cannot be listened on")
    return text


def _listening(text: str) -> str:
    try:
        return text if text == "localhost" else ip_address(text)
    except ValueError:
        raise ValueError("a program listens on an IP address or localhost: name the address, not the host") from None


def _address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", text):
            raise ValueError("neither an IP address nor a host name") from None
    return text


def _web_address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError("an address begins with http:// or https://, and a host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("an address has no user, password, query or fragment: they would be readable by all")
    return text.rstrip("/")


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Distribution = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
Dotted = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*$")]
HostPath = Annotated[str, AfterValidator(host_path)]
Place = Annotated[Path, BeforeValidator(_place)]
"""A HostPath as a Path, for the program that opens it."""
Package = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]*$")]
PythonVersion = Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
Remote = Annotated[str, StringConstraints(min_length=1), AfterValidator(_no_secret)]
Address = Annotated[str, AfterValidator(_address)]
ListenAddress = Annotated[str, AfterValidator(_listening)]
"""What a server binds: an IP address or localhost. A host name would mean another one whenever it is asked."""
WebAddress = Annotated[str, AfterValidator(_web_address)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
