"""The one gate for words of others before they reach a terminal, a log or a page: of engines, listeners, jobs, hosts.

A terminal obeys what it is sent: it can be told another title, what the clipboard holds, or what seems to stand in a
line above. Both programs send all their output through `Gate` (tests/unit/test_gate.py finds what goes round it).
"""

import re
from shutil import get_terminal_size
from typing import Any, TextIO, cast

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Set Graphic Rendition (ECMA-48, 8.3.117): colours of engines' log lines, of no use to us."""
OURS = re.compile(r"(\x1b\[(?:[0-2]|[39][0-7])?m)")
"""The colours that click gives: nothing is hidden by them, nor moved."""
LONGEST_LINE = 4000
"""Characters of a line on a terminal."""
_JOINERS = "\u200c\u200d"  # Persian, Hindi and emoji are written with them, and no order of a line changes


def printable(text: str, keep: str = "") -> str:
    """Text that a terminal only shows. What it would obey stands there as Python writes it, such as \\x1b.

    Colours go. Escaped are control characters (C0, C1), what reorders or hides text (bidi, zero width), lone surrogates
    and what is no character; blanks of other kinds become blanks. keep: characters that stay, such as a line feed.
    """
    if text.isprintable():
        return text
    return "".join(one if one in keep else _shown(one) for one in COLOUR.sub("", text))


def _shown(one: str) -> str:
    if one.isprintable() or one in _JOINERS:
        return one
    return " " if one.isspace() and ord(one) > 0x9F else one.encode("unicode_escape").decode("ascii")


def one_line(text: object, most: int = 300) -> str:
    """Foreign words within a line of ours: printable, without line breaks, at most so many characters."""
    line = printable(" ".join(COLOUR.sub("", str(text)[: most * 20]).split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


class Gate:
    """A stream that lets nothing through but what a terminal only shows, line feeds and tabs, and colours of ours.

    Lines on a terminal are cut; what goes to a file or program is whole.
    """

    def __init__(self, stream: TextIO, *, colours: bool = False) -> None:
        self._stream, self._colours = stream, colours

    def write(self, text: str) -> int:
        parts = OURS.split(text) if self._colours else [text]
        # Of a split by a pattern in brackets, every second part is what matched.
        shown = (part if number % 2 else printable(part, keep="\n\t") for number, part in enumerate(parts))
        self._stream.write(self._cut("".join(shown)))
        return len(text)

    def _cut(self, text: str) -> str:
        if len(text) <= LONGEST_LINE or not self._stream.isatty():
            return text
        lines = text.split("\n")
        return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines)

    def show(self, text: str) -> None:
        """Let a line of a terminal read `text`, cut to its width, in place of what stands there. Empty: clear it."""
        self._stream.write(f"\r{one_line(text, get_terminal_size().columns - 1)}\x1b[K")
        self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def gated(stream: TextIO, *, colours: bool = False) -> TextIO:
    """The stream behind the gate, once."""
    return stream if isinstance(stream, Gate) else cast("TextIO", Gate(stream, colours=colours))
