"""Foreign words pass one gate: a terminal shows them, and obeys none of them. Whatever goes round the gate is found."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.__main__ import VERBS
from rig.__main__ import kimi_rig as command
from rig.__main__ import main as kimi_rig
from rig.bench import report
from rig.catalog.entries import ROOT
from rig.cli import status
from rig.facts.servers import Servers
from rigctl.cli import main
from rigctl.contract.foreign import Gate, gated, one_line, printable
from rigctl.guarded import Place
from rigctl.services import status as host_status
from rigctl.services import switching
from rigctl.supervisor.engine_log import _LONGEST, EngineLog, RunFile
from tests.unit.serving import Run

TITLE, CLIPBOARD, UP = "\x1b]0;owned\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[1A\x1b[2K"
C1, BIDI, HIDDEN = "\x9b2J", "\u202esh.exe", "\x1b[8m"
HOSTILE = f"{TITLE}{CLIPBOARD}{UP}{C1}{BIDI}{HIDDEN}\u2066\u200b\x00\ud800 <script>alert(1)</script>"
HARMFUL = [chr(code) for code in [*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F)]]


def assert_harmless(text: str) -> None:
    assert not [one for one in text if one in HARMFUL or (not one.isprintable() and one not in "\n\t\u200c\u200d")], (
        text
    )


@given(st.text())
def test_whatever_comes_is_only_shown(text: str) -> None:
    for keep in ("", "\t", "\n\t"):
        shown = printable(text, keep)
        assert all(one.isprintable() or one in f"{keep}\u200c\u200d" for one in shown)
        assert printable(shown, keep) == shown
        shown.encode()
    assert printable(text) == text or not text.isprintable()


@given(st.text(), st.integers(10, 400))
def test_one_line_is_one_and_bounded(text: str, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most and len(line.splitlines()) <= 1
    assert_harmless(line)


def test_no_line_break_of_any_kind_makes_a_second_line() -> None:
    assert one_line("a\r\nb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h") == "a b c d e f g h"
    assert one_line("x" * 1000, 20) == "x" * 17 + "..."
    assert one_line(ValueError("\x1b[31mred\x1b[0m")) == "red"


def test_what_people_write_stays() -> None:
    for text in (
        "Gr\u00fc\u00dfe",
        "\u4f60\u597d",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f469\u200d\U0001f680 \u2713",
    ):
        assert printable(text) == text == one_line(text)
    assert printable("a\u00a0b") == "a b"


@given(st.lists(st.text(st.characters() | st.sampled_from("\x1b[]m\n\x9b3180;")), max_size=5))
def test_a_gated_stream_passes_nothing_else(parts: list[str]) -> None:
    for colours in (False, True):
        below = io.StringIO()
        for part in parts:
            print(part, end="", file=gated(below, colours=colours))
        text = below.getvalue()
        for colour in ("\x1b[m", *(f"\x1b[{number}m" for number in [0, 1, 2, *range(30, 38), *range(90, 98)])):
            text = text.replace(colour, "") if colours else text
        assert_harmless(text)


def test_a_long_line_is_cut_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.StringIO()
    gated(below).write("x" * 10000)
    assert len(below.getvalue()) == 10000
    monkeypatch.setattr(below, "isatty", lambda: True)
    gated(below).write("y" * 10000 + "\nz\n")
    assert below.getvalue()[10000:] == "y" * 4000 + "...\nz\n"
    assert gated(gated(below)) is gated(below) or isinstance(gated(below), Gate)


# -- every place that prints ------------------------------------------------------------------------------------------

PROGRAMS = [path for room in ("rig", "tasks", "files/hostkit/rigctl") for path in sorted((ROOT / room).rglob("*.py"))]
RAW = {
    "files/hostkit/rigctl/supervisor/engine_log.py": "an engine's lines to the journal, made printable there",
    "files/hostkit/rigctl/checkpoints/xet.py": "bytes of a checkpoint, into a pipe to rigctl",
    "files/hostkit/rigctl/kernel/compile_job.py": "a compiler's words to the build, whose own output is gated",
}
"""Files that write to a stream's bytes."""
OWN_STREAM = {
    "rig/cli/converge.py:run_pyinfra": "pyinfra with config.py, which gates its streams (pyinfra_mends)",
    "rig/cli/demo.py:demo": "the operator's own box",
    "rig/cli/verify.py:verify_command": "pytest, which shows what a host said as Python writes it",
    "rig/cli/pyinfra_mends.py:proxy": "the operator's own proxy command",
    "rig/operations/remove_trees.py:remove_tree": "a program that runs on a host: pyinfra has its output",
    "rig/sandbox/build.py:_add_user": "the operator's own box",
    "rig/sandbox/build.py:make_keys": "the operator's own box",
    "rig/sandbox/build.py:remove_tree": "the operator's own box",
    "files/hostkit/rigctl/bench/sweep.py:_run": "systemctl",
    "files/hostkit/rigctl/bench/sweep.py:_stop_unit": "systemctl",
    "files/hostkit/rigctl/bench/sweep.py:_start": "systemctl",
    "files/hostkit/rigctl/bench/sweep.py:_active": "systemctl",
    "files/hostkit/rigctl/services/switching.py:switch_to": "systemctl",
    "files/hostkit/rigctl/engines/prune.py:_sweep_cache": "this program, as the builder",
    "files/hostkit/rigctl/kernel/compile_job.py:_run": "a compiler's words to the build, whose own output is gated",
}
"""Functions whose children write to our own streams, and why that is no way round the gate."""
CHILDREN = {"run", "call", "Popen", "check_call"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_nothing_writes_past_the_gate() -> None:
    found = set()
    for path in PROGRAMS:
        for node in ast.walk(parsed(path)):
            raw = isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
                ("sys.stdout.buffer", "sys.stderr.buffer")
            )
            kept = isinstance(node, ast.Attribute) and node.attr in ("__stdout__", "__stderr__")
            wrote = (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "os.write"
                and ast.unparse(node.args[0]) in "12"
            )
            found |= {name(path)} if raw or kept or wrote else set()
    assert found == set(RAW), "print() goes through the gate; a stream's bytes do not"


def test_no_child_writes_to_our_streams_unseen() -> None:
    found = set()
    for path in PROGRAMS:
        for function in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                kind = ast.unparse(call.func)
                given = {keyword.arg for keyword in call.keywords}
                starts = kind.startswith("subprocess.") and kind.split(".")[1] in CHILDREN
                if starts and not {"capture_output", "stdout"} & given and None not in given:
                    found.add(f"{name(path)}:{function.name}")
    assert not found - set(OWN_STREAM), "print what they say instead (rigctl/services/switching.py, _shown)"


def test_every_command_has_its_streams_gated() -> None:
    """All commands of the control side begin in `rig.__main__.main`, all of the host in `rigctl.cli.main`."""
    [main_] = [node for node in parsed(ROOT / "rig/__main__.py").body if getattr(node, "name", "") == "main"]
    assert [ast.unparse(node.func) for node in ast.walk(main_) if isinstance(node, ast.Call)][:2] == ["gated", "gated"]
    own = [name(path) for path in PROGRAMS if '__name__ == "__main__"' in path.read_text()]
    rooms = ("rig/cli/", "rig/maintain/", "tasks/")
    assert [one for one in own if one.startswith(rooms)] == ["rig/maintain/schemas.py"]


def test_every_verb_is_there() -> None:
    for verb in [name for verbs in VERBS.values() for name in verbs]:
        found = command.get_command(click.Context(command), verb)
        assert found is not None and found.name == verb and found.help and found.get_short_help_str(), verb


def test_a_command_gates_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    kimi_rig(["--help"])
    print(HOSTILE)
    print(HOSTILE, file=sys.stderr)
    for text in capsys.readouterr():
        assert "\\x1b]0;owned" in text
        assert_harmless(text)


# -- words of others, by the way they come --------------------------------------------------------------------------


def test_status_of_a_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`rigctl status`: causes and last words are the engine's."""
    row = {"state": HOSTILE, "name": HOSTILE, "status": HOSTILE, "remarks": [HOSTILE]}
    monkeypatch.setattr(host_status, "rows", lambda: [row])
    assert main(["status"]) == 0
    assert_harmless(capsys.readouterr().out)


def test_a_log_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(HOSTILE.encode(errors="replace").decode())
    kimi_rig(["--help"])
    assert switching._shown(["cat", str(tmp_path / "a.log")]) == 0
    text = capsys.readouterr().out
    assert "owned" in text
    assert_harmless(text)


def test_lines_of_an_engine(tmp_path: Path) -> None:
    journal = io.BytesIO()
    log = EngineLog("vllm", [], [], RunFile(Place(str(tmp_path)), 2, 1), journal)
    line = f"RuntimeError: {HOSTILE}".encode(errors="replace")
    log._line(line + b"\n")
    log._line(b"<0>" + line + b"\n")
    log.finish()
    [file] = tmp_path.glob("*.log")
    for text in (file.read_text(), journal.getvalue().decode(), *log.last_words, log.last_error or ""):
        assert_harmless(text)
    assert journal.getvalue().splitlines()[1].startswith(b"<6><0>"), "no line chooses its priority"


@pytest.mark.parametrize("before", range(_LONGEST - 12, _LONGEST + 2))
def test_a_secret_in_a_line_without_end(tmp_path: Path, before: int) -> None:
    """It may come in two reads, and a line that is too long is cut."""
    journal = io.BytesIO()
    log = EngineLog("vllm", [], ["s3cr3t-s3cr3t"], RunFile(Place(str(tmp_path)), 2, 1), journal)
    reader, writer = os.pipe()
    log.follow(reader)
    for piece in (b"x" * before + b"s3cr3t-", b"s3cr3t" + b"y" * 10):
        os.write(writer, piece)
        time.sleep(0.02)
    os.close(writer)
    log.finish()
    assert b"s3cr3t" not in journal.getvalue().replace(b"\n", b"") and b"y" * 10 in journal.getvalue()


def test_the_cause_of_an_end_and_the_status_of_a_unit(tmp_path: Path) -> None:
    run = Run(tmp_path, {"load": [["log", f"RuntimeError: {HOSTILE.encode(errors='replace').decode()}"], ["exit", 3]]})
    assert run.end() == 78
    run.until("STOPPING=1")
    said = "".join(run.said)
    # Every user can read a unit's status, and an engine's error may quote a request.
    assert "RuntimeError: (`rigctl status` as root says more)" in said and "owned" not in said
    assert_harmless(said)
    assert_harmless(cause := run.json("cause.json")["cause"])
    assert "owned" in cause


def test_names_of_models_that_a_stranger_serves() -> None:
    answer = json.dumps({"data": [{"id": HOSTILE * 100}] * 50})
    [server] = Servers().process(["listens|127.0.0.1:8000|1|root||x", f"models|127.0.0.1:8000|{answer}"])
    assert len(server.models) == 4 and all(len(one) <= 100 for one in server.models)
    for one in server.models:
        assert_harmless(one)
    deep = "[" * 100_000
    assert Servers().process(["listens|127.0.0.1:8000|1|root||x", f"models|127.0.0.1:8000|{deep}"])[0].models == ()


def test_what_a_host_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """`make status`: sections, health and a failing ssh."""
    found = status.HostStatus(HOSTILE, trouble=HOSTILE, reached=False)
    kimi_rig(["--help"])
    print(status.lines([found]))
    assert_harmless(capsys.readouterr().out)


@pytest.mark.slow
def test_what_a_host_says_to_pyinfra(tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.write_bytes(HOSTILE.encode(errors="replace") + b"\n")
    for line in (f"cat {hostile}", f"cat {hostile} >&2; exit 1"):
        done = subprocess.run(
            [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), "-v", "@local", "exec", "-y", "--", line],
            capture_output=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "FORCE_COLOR": "1"},
        )
        text = (done.stdout + done.stderr).decode(errors="replace")
        assert "owned" in text, text
        for harm in (TITLE, CLIPBOARD, UP, C1, BIDI, HIDDEN, "\x07"):
            assert harm not in text


def test_words_in_report_pages() -> None:
    html = report.renderer(html=True).from_string("{{ x }}|{{ x | cell }}").render(x=HOSTILE)
    text = report.renderer(html=False).from_string("{{ x }}|{{ x | cell }}").render(x=HOSTILE)
    for page in (html, text):
        assert "<script>" not in page and "&lt;script&gt;" in page
        assert_harmless(page)
