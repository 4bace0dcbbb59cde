"""Who we are on a host, asked without becoming root."""

from collections.abc import Iterable
from dataclasses import dataclass

from pyinfra.api.facts import FactBase


@dataclass(frozen=True)
class Rights:
    """user: the login. root: whether commands run as root. trouble: sudo's own words when they do not."""

    user: str = ""
    root: bool = True
    trouble: str = ""


class Privilege(FactBase[Rights]):
    """The login, and with `sudo` whether sudo works without asking anything. Never waits for a password."""

    def command(self, sudo: bool) -> str:
        root = "sudo -n id -u 2>&1" if sudo else "id -u"
        return f'echo "user $(id -un)"; ( {root} ) </dev/null | tail -n 1 | sed "s/^/root /"'

    def default(self) -> Rights:  # type: ignore[override]  # see rig/facts/state.py
        return Rights()

    def process(self, output: Iterable[str]) -> Rights:
        found = dict(line.split(" ", 1) for line in output if " " in line)
        answer = found.get("root", "")
        return Rights(found.get("user", ""), answer == "0", "" if answer.isdigit() else answer.removeprefix("sudo: "))
