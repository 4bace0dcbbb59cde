"""`rigctl probe`: what an installed engine can do, asked of its code rather than of its version number."""

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rigctl import builder
from rigctl.contract.order import Part
from rigctl.engines.installed import interpreter, site_packages
from rigctl.errors import RigctlError

SCRIPT = Path(__file__).with_name("probe_script.py")
ENGINES = ("vllm", "sglang")
# vLLM takes 10 s with bytecode and close to two minutes without it on two slow cores.
TIMEOUT_S = 300
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""A probe asks nobody else; its caches are in the sandbox's own home, and leave no trace."""
PREFIXES = ("VLLM_", "SGLANG_", "SGL_")


class Verdict(Part):
    """Whether the engine has a feature, or takes a command line, and how or why not."""

    ok: bool
    detail: str


class Parsed(Verdict):
    """A verdict on one command line."""

    argv: list[str]


class Answer(Part):
    """What probe_script.py answers."""

    engine: str
    version: str
    commands: list[Parsed] | None = None
    options: dict[str, str] | None = None
    features: dict[str, Verdict]


def ask(
    env: Path,
    engine: str,
    commands: Sequence[Sequence[str]] = (),
    *,
    features: Sequence[str] = (),
    options: bool = False,
) -> dict[str, Any]:
    """Put the questions of probe_script.py to the engine in `env`; `RigctlError` if it does not answer.

    features: those with an argument, such as tool_parser:kimi_k2, beside those that are always asked for.
    """
    request = {"engine": engine, "commands": commands, "features": list(features), "options": options}
    with builder.sandboxed(
        [interpreter(env), "-I", "-B", SCRIPT],
        unit=f"probe-{env.parent.name}-{env.name}-{os.getpid()}",
        reads=[env],
        environment=OFFLINE,
        seconds=TIMEOUT_S,
    ) as command:
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request),
                text=True,
                errors="replace",
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RigctlError(f"{env}: {engine} did not answer within {TIMEOUT_S} s") from None
    try:
        answer = json.loads(done.stdout)
    except (ValueError, RecursionError):
        tail = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise RigctlError(f"{env}: {engine} does not answer (exit code {done.returncode}):\n  {tail}") from None
    return Answer.validated(answer, f"{env}: the answer of {engine}").model_dump(exclude_none=True)


def unread_variables(site: Path, engine: str, names: Iterable[str]) -> list[str]:
    """Those of the engines' variables (VLLM_*, SGLANG_*, SGL_*) that no file of this engine mentions."""
    wanted = {name for name in names if name.startswith(PREFIXES)}
    if not wanted:
        return []
    word = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(wanted, key=len, reverse=True)))
    for path in (site / engine).rglob("*.py"):
        wanted -= set(word.findall(path.read_text(errors="replace")))
        if not wanted:
            break
    return sorted(wanted)


def metric_names(site: Path, engine: str) -> list[str]:
    """Names of the metrics that the engine's source gives (vllm:..., sglang:...), as written there."""
    name = re.compile(rf"""["']({engine}:[a-z0-9_]+)["']""")
    found: set[str] = set()
    for path in (site / engine).rglob("*.py"):
        found |= set(name.findall(path.read_text(errors="replace")))
    return sorted(found)


def refusals(result: dict[str, Any], require: Iterable[str]) -> list[str]:
    """What stands against using this engine: a refused command line, a required feature that is not there."""
    reasons: list[str] = []
    engine = f"{result['engine']} {result['version']}"
    reasons += [
        f"{engine} refuses {shlex.join(each['argv'])}: {each['detail']}"
        for each in result.get("commands", ())
        if not each["ok"]
    ]
    for name in require:
        feature = result.get("features", {}).get(name)
        if feature is None:
            raise RigctlError(f"no feature {name!r}; there are {', '.join(result.get('features', {}))}")
        if not feature["ok"]:
            reasons.append(f"{engine} lacks {name}: {feature['detail']}")
    return reasons


def json_strings(text: str) -> list[str]:
    """A JSON list of strings; argparse reports the ValueError that pydantic raises for anything else."""
    return TypeAdapter(list[str]).validate_json(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as JSON; `RigctlError` when a command line or a required feature is refused."""
    result = ask(arguments.env, arguments.engine, arguments.argv, features=arguments.require)
    site = site_packages(arguments.env)
    result["unread_variables"] = unread_variables(site, arguments.engine, arguments.variable)
    print(json.dumps(result, indent=2))
    if reasons := refusals(result, arguments.require):
        raise RigctlError("\n  ".join(reasons))
    return 0


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `probe` to the command line."""
    parser = subparsers.add_parser("probe", help="ask an installed engine what it can do")
    parser.add_argument("--env", type=Path, required=True, help="the engine's virtual environment")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    argv_help = "a whole command line of the engine, parsed by its own parser; repeatable"
    parser.add_argument("--argv", action="append", default=[], metavar="JSON", help=argv_help, type=json_strings)
    parser.add_argument("--variable", action="append", default=[], help="a variable that a unit sets; repeatable")
    parser.add_argument("--require", action="append", default=[], help="fail without this feature; repeatable")
    parser.set_defaults(run=run)
