"""The templates of files that a host gets (templates/): no HTML, nothing undefined, every line as it stands."""

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rig.catalog.entries import ROOT

JINJA = Environment(
    loader=FileSystemLoader(ROOT / "templates"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # noqa: S701  # unit files, not HTML; quoting is systemd's, by the filter below
)


def systemd_quote(word: str) -> str:
    r"""One word of ExecStart= or Environment=, quoted so that systemd passes on exactly `word`.

    Escapes %, $ (as %% and $$), backslash, quotes and control characters (systemd.syntax(7), systemd.service(5)).
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = "".join(f"\\x{ord(c):02x}" if ord(c) < 0x20 or ord(c) == 0x7F else c for c in escaped)
    return f'"{escaped}"' if escaped != word or not word or set(word) & set(" '\";") else word


def systemd_assignment(name: str, value: str) -> str:
    """NAME=value for Environment=, where $ has no special meaning (systemd.exec(5))."""
    return systemd_quote(f"{name}={value}").replace("$$", "$")


def one_line(text: str) -> str:
    """A description for Description=: % doubled, all white space a blank, nothing that continues the line."""
    return " ".join(text.split()).replace("%", "%%").rstrip("\\")


JINJA.filters["systemd_quote"] = systemd_quote
