"""The pyinfra fact that reads a whole host in one remote command."""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pyinfra.api.facts import FactBase

from rig.facts.host import FactsError, HostFacts, parse_host
from rigctl import guarded, reached

SCRIPT = Path(__file__).with_name("remote_script.py")
NO_PYTHON = "python3 is missing"


def carried(script: Path, *modules: ModuleType) -> str:
    """A script as one program for a host that has nothing of ours: the modules that it imports of ours before it.

    Each has its imports from rigctl on one line.
    """
    texts = [Path(str(module.__file__)).read_text() for module in modules] + [script.read_text()]
    future = "from __future__ import annotations\n"
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    return future + "".join(line for line in lines if line != future and not line.startswith("from rigctl."))


class HostReport(FactBase[HostFacts]):
    """Everything remote_script.py reads. Where it cannot run, all is unknown and HostFacts.unknown["host"] says why.

    wanted: what is asked beyond the host itself, see remote_script.py (rig.plan.host_plan.questions).
    """

    def command(self, wanted: Mapping[str, Any] | None = None) -> str:
        options = shlex.quote(json.dumps(dict(wanted or {}), sort_keys=True))
        return (
            f"if ! command -v python3 >/dev/null; then echo {shlex.quote(NO_PYTHON)}; exit 0; fi\n"
            f"python3 - {options} <<'KIMI_RIG_FACTS'\n{carried(SCRIPT, guarded, reached)}\nKIMI_RIG_FACTS"
        )

    def default(self) -> HostFacts:  # type: ignore[override]  # pyinfra types default() as returning the class
        return HostFacts(unknown={"host": "the facts script gave no answer"})

    def process(self, output: Iterable[str]) -> HostFacts:
        text = "\n".join(output)
        if text.strip() == NO_PYTHON:
            return HostFacts(unknown={"host": f"{NO_PYTHON}; the base stage installs it"})
        try:
            return parse_host(text)
        except FactsError as error:
            return HostFacts(unknown={"host": str(error)})
