"""Words of other programs may be any bytes: they are shown, and never end ours."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rigctl import cli
from rigctl.errors import RigctlError
from rigctl.services import systemd
from rigctl.supervisor.ended import command

PRODUCT = [path for room in ("rig", "tasks", "files/hostkit/rigctl") for path in (ROOT / room).rglob("*.py")]


def strict_calls(text: str) -> list[int]:
    """Lines of calls that decode a program's output, and do not say how."""
    found = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        named = {keyword.arg for keyword in call.keywords}
        if named & {"text", "universal_newlines"} and "errors" not in named:
            found.append(call.lineno)
    return found


def test_the_output_of_programs_is_decoded_with_replacement_everywhere() -> None:
    assert strict_calls("run(x, text=True)") == [1]
    wrong = [f"{path}:{line}" for path in PRODUCT for line in strict_calls(path.read_text())]
    assert not wrong, wrong


@settings(max_examples=10, deadline=None)  # each is a process
@given(st.binary(max_size=40))
def test_what_a_program_says_is_shown(words: bytes) -> None:
    told = words.replace(b"\0", b"").replace(b"'", b"")
    with pytest.MonkeyPatch.context() as patch:
        run = subprocess.run
        code = f"import sys; sys.stderr.buffer.write({told!r}); sys.exit(1)"
        patch.setattr(subprocess, "run", lambda _, **how: run([sys.executable, "-c", code], **how))
        with pytest.raises(RigctlError, match="systemctl start x"):
            systemd.systemctl("start", "x")


def test_a_command_line_of_any_bytes_is_shown() -> None:
    code = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, b"\xff\xfe"]) as process:
        try:
            while "sleep" not in (shown := command(process.pid)):
                pass
            assert shown.encode().endswith("\ufffd\ufffd".encode())
        finally:
            process.kill()


def test_a_name_of_any_bytes_is_printed(tmp_path: Path) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/\xff")
    Path(path, "lib/python3.11/site-packages").mkdir(parents=True)
    code = "import sys; from rigctl.cli import main; sys.exit(main())"
    command_line = [sys.executable, "-c", code, "drift", "check", "--full", "--env", path]
    done = subprocess.run(
        command_line, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"/\\udcff: as it was installed\n")


def test_the_command_line_reports_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise OSError(28, "No space left on device: 5 bytes are needed", "/var/lib/x")

    monkeypatch.setattr("rigctl.services.status.show", full)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "rigctl status: /var/lib/x: No space left on device: 5 bytes are needed\n"
