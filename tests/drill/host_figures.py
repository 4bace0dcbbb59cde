"""What reading a whole host costs: pyinfra INVENTORY tests/drill/host_figures.py --dry prints one JSON line a host.

Medians of five, milliseconds. plan: all that a deploy reads before its first operation. facts: the facts' one command;
script: as the host itself counts it. null: a command that does nothing, for the connection's own share.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from pyinfra import host, logger

from rig.facts.report import HostReport
from rig.facts.state import Lines
from rig.plan.current import _data, current_plan
from rig.plan.host_plan import questions

TIMES = 5


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds and remote commands of an action."""
    taken, commands = [], []
    run = host.run_shell_command

    def counting(*arguments: Any, **named: Any) -> Any:
        commands.append(1)
        return run(*arguments, **named)

    host.run_shell_command = counting  # type: ignore[method-assign]  # counts what a deploy sends
    for _ in range(TIMES):
        begin = time.perf_counter()
        action()
        taken.append((time.perf_counter() - begin) * 1000)
    host.run_shell_command = run  # type: ignore[method-assign]  # counts what a deploy sends
    return round(statistics.median(taken), 1), len(commands) / TIMES


if __name__ == "builtins":
    wanted = questions(_data())
    figures: dict[str, Any] = {}
    for name, action in {
        "plan": current_plan,
        "facts": lambda: host.get_fact(HostReport, wanted=wanted),
        "null": lambda: host.get_fact(Lines, script="true"),
    }.items():
        figures[f"{name}_ms"], figures[f"{name}_commands"] = measured(action)
    seconds = [host.get_fact(HostReport, wanted=wanted).seconds or 0.0 for _ in range(TIMES)]
    figures["script_ms"] = round(statistics.median(seconds) * 1000, 1)
    logger.info(json.dumps({"host": host.name, **figures}))
