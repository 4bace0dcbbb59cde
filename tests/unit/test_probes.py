"""The probe's plumbing, with a stand-in engine in a real virtual environment's layout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rigctl import cli
from rigctl.engines import probe_script, probes
from rigctl.errors import RigctlError

SGLANG = {
    "sglang/__init__.py": "__version__ = '0.0'\n",
    "sglang/srt/server_args.py": """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--speculative-algorithm", choices=["EAGLE3"])
        parser.add_argument("--bs-decode")
        parser.add_argument("--bs-prefill")
""",
    "sglang/srt/function_call/function_call_parser.py": """
import os
class FunctionCallParser:
    ToolCallParserEnum = {"kimi_k2": os.environ["HOME"]}
""",
    "sglang/srt/parser/reasoning_parser.py": "class ReasoningParser:\n    DetectorMap = {}\n",
    "sglang/srt/models/kimi_k25.py": """
import sgl_kernel.sub.ops
from sgl_kernel import types
TYPES = [types.uint4]
class KimiK25ForConditionalGeneration:
    def set_eagle3_layers_to_capture(self): os.environ["SGLANG_READ_HERE"]
    def get_embed_and_head(self): ...
EntryClass = [
    KimiK25ForConditionalGeneration,
]
""",
    "sgl_kernel/__init__.py": "raise ImportError('libcuda.so.1: cannot open shared object file')\n",
}


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """A virtual environment with a small sglang, whose kernel needs a driver to be imported."""
    root = tmp_path / "env"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    base = Path(os.path.realpath(sys.executable))
    (root / "bin").mkdir(parents=True)
    (root / "bin/python").symlink_to(base)
    (root / "pyvenv.cfg").write_text(f"home = {base.parent}\nversion = {version}\n")
    for path, text in SGLANG.items():
        file = root / f"lib/python{version}/site-packages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_features_of_an_engine(env: Path) -> None:
    answer = probes.ask(env, "sglang")
    verdicts = answer["features"]
    assert answer["version"] == "0.0"
    assert verdicts["eagle3_admitted"] == {"ok": True, "detail": "admits EAGLE3"}
    assert verdicts["reasoning_parser"] == {"ok": False, "detail": "KeyError: 'kimi_k2'"}
    assert not verdicts["eagle3_interface"]["ok"]
    assert "lacks set_embed_and_head (imported with a stand-in" in verdicts["eagle3_interface"]["detail"]
    assert "rigctl-builder-" in verdicts["tool_parser"]["detail"], "the engine saw a real home directory"
    assert not list(env.rglob("__pycache__")), "the probe wrote into the environment"


def test_features_with_an_argument(env: Path) -> None:
    asked = ["tool_parser:kimi_k2", "tool_parser:glm47", "architecture:KimiK25ForConditionalGeneration"]
    asked += ["architecture:Nope", "eagle3_interface:KimiK25ForConditionalGeneration"]
    verdicts = probes.ask(env, "sglang", features=asked)["features"]
    assert {name: verdicts[name]["ok"] for name in asked} == dict(
        zip(asked, [True, False, True, False, False], strict=True)
    )
    assert verdicts["architecture:Nope"]["detail"] == "RefusedError: no module registers Nope"
    assert verdicts["architecture:KimiK25ForConditionalGeneration"]["detail"] == "sglang.srt.models.kimi_k25"


def test_command_lines(env: Path) -> None:
    start = ["/env/bin/python", "-m", "sglang.launch_server"]
    commands = [
        [*start, "--model-path", "/m"],
        [*start, "--model-path", "/m", "--bs", "4"],
        start,
        ["/env/bin/python", "-c", "pass"],
    ]
    answer = probes.ask(env, "sglang", commands, options=True)
    good, ambiguous, incomplete, other = answer["commands"]
    assert good == {"argv": commands[0], "ok": True, "detail": ""}
    assert ambiguous["detail"] == "ambiguous option: --bs could match --bs-decode, --bs-prefill"
    assert incomplete["detail"] == "the following arguments are required: --model-path"
    assert other["detail"].startswith("not a command that starts sglang")
    assert answer["options"]["--bs-decode"] == "None"


def test_an_engine_that_does_not_import_is_an_error(env: Path) -> None:
    with pytest.raises(RigctlError, match="vllm does not answer"):
        probes.ask(env, "vllm")


def test_command_line_refuses(env: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = ["probe", "--env", str(env), "--engine", "sglang"]
    refused = json.dumps(["/env/bin/sglang", "serve", "--model-pth"])
    assert cli.main([*probe, "--argv", refused]) == 1
    assert "sglang 0.0 refuses /env/bin/sglang serve --model-pth" in capsys.readouterr().err
    assert cli.main([*probe, "--require", "reasoning_parser"]) == 1
    assert "sglang 0.0 lacks reasoning_parser: KeyError" in capsys.readouterr().err
    assert cli.main([*probe, "--require", "telepathy"]) == 1
    assert "no feature 'telepathy'; there are" in capsys.readouterr().err
    for argv in ("not json", "{}", "[1]"):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*probe, "--argv", argv])
    assert "argument --argv: invalid json_strings value" in capsys.readouterr().err
    assert cli.main([*probe, "--variable", "SGLANG_READ_HERE", "--variable", "SGLANG_READ", "--variable", "A"]) == 0
    assert json.loads(capsys.readouterr().out)["unread_variables"] == ["SGLANG_READ"]


@pytest.mark.parametrize(
    ("engine", "argv", "flags"),
    [
        ("vllm", ["/e/bin/vllm", "serve", "/m", "--x"], ["/m", "--x"]),
        ("vllm", ["/e/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--x"], ["--x"]),
        ("sglang", ["/e/bin/sglang", "serve", "--x"], ["--x"]),
    ],
)
def test_ways_to_start(engine: str, argv: list[str], flags: list[str]) -> None:
    assert probe_script.flags_of(engine, argv) == flags
