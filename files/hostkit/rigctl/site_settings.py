"""Of uv's and pip's settings on this machine, those that say where packages come from; others are ignored and named.

A target, a user scheme or a constraint in /etc/pip.conf or a uv.toml would install elsewhere, or something else. Run as
a program (install.sh does, with any Python) it prints shell lines that leave pip with these settings alone.
"""

import configparser
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SOURCES = {
    "pip": "index-url extra-index-url find-links no-index proxy cert client-cert trusted-host timeout retries "
    "default-timeout disable-pip-version-check keyring-provider",
    "uv": "index-url extra-index-url find-links no-index default-index index native-tls system-certs insecure-host "
    "http-timeout http-retries cache-dir index-strategy keyring-provider",
}
"""What a site may set, as the words of a configuration file or, with PIP_ or UV_ before them, of the environment."""
RENAMED = {"allow-insecure-host": "insecure-host"}
PROXIES = {"http-proxy": "HTTP_PROXY", "https-proxy": "HTTPS_PROXY", "no-proxy": "NO_PROXY"}
LISTED_BY = {"find-links": ","}
FILES = {
    "pip": ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf"),
    "uv": ("/etc/uv/uv.toml", "~/.config/uv/uv.toml"),
}
"""The system's first, so that the user's win."""


def environment(tool: str, before: Mapping[str, str], files: tuple[str, ...] = ()) -> tuple[dict[str, str], list[str]]:
    """The environment for `tool` ("pip", "uv"), and what was ignored, in words. before: whose own settings win."""
    prefix, allowed = f"{tool.upper()}_", SOURCES[tool].split()
    found: dict[str, str] = {}
    ignored: list[str] = []
    named = [before["PIP_CONFIG_FILE"]] if tool == "pip" and "PIP_CONFIG_FILE" in before else []
    for file in [*(files or FILES[tool]), *named]:
        path = Path(file).expanduser()
        try:
            settings = dict(_settings(tool, path.read_text(encoding="utf-8", errors="replace")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, configparser.Error) as error:
            ignored.append(f"{path} is ignored: {str(error).splitlines()[0]}")
            continue
        for key, value in settings.items():
            name = PROXIES.get(key) or f"{prefix}{key.upper().replace('-', '_')}"
            if key in allowed or key in PROXIES:
                found[name] = value
            else:
                ignored.append(f"{path}: {key} is ignored: it does not say where packages come from")
    kept = {f"{prefix}{key.upper().replace('-', '_')}" for key in allowed}
    for name, value in before.items():
        if not name.startswith(prefix) or name in kept or name.startswith("UV_INDEX_"):  # credentials of an index
            found[name] = value
        elif name not in ("PIP_CONFIG_FILE", "UV_NO_CONFIG"):
            ignored.append(f"{name} of the environment is ignored: it does not say where packages come from")
    return {**found, **({"PIP_CONFIG_FILE": os.devnull} if tool == "pip" else {"UV_NO_CONFIG": "1"})}, ignored


def announced(tool: str) -> dict[str, str]:
    """The environment of this process as the tool may see it; what is left out of it is printed."""
    found, ignored = environment(tool, os.environ)
    for note in dict.fromkeys(ignored):
        print(f"note: {note}", flush=True)
    return found


def _settings(tool: str, text: str) -> Iterator[tuple[str, str]]:
    """Settings of one file. Raises ValueError or configparser.Error for a file that cannot be read."""
    if tool == "pip":
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        for section in ("global", "install"):
            for key, value in parser.items(section) if parser.has_section(section) else ():
                yield key.replace("_", "-"), " ".join(value.split())
        return
    import tomllib  # noqa: PLC0415  # not in the older Python that may run this for pip

    document = tomllib.loads(text)
    nested = document.pop("pip", {})
    indexes = document.pop("index", [])
    for key, value in {**document, **(nested if isinstance(nested, dict) else {})}.items():
        yield RENAMED.get(key, key), _word(key, value)
    if isinstance(indexes, list):
        entries = [entry for entry in indexes if isinstance(entry, dict) and "url" in entry]
        for key, default in (("default-index", True), ("index", False)):
            chosen = [entry for entry in entries if bool(entry.get("default")) == default]
            if chosen:
                yield key, " ".join(f"{e['name']}={e['url']}" if "name" in e else str(e["url"]) for e in chosen)


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return LISTED_BY.get(key, " ").join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    made, notes = environment("pip", os.environ)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for name in sorted(set(os.environ) - set(made)):
        print(f"unset {name}")
    for name in sorted(name for name in made if made[name] != os.environ.get(name)):
        print(f"export {name}={shlex.quote(made[name])}")
