"""Who serves on a host already: processes on the ports that configurations want, and on the GPUs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyinfra.api.facts import FactBase

from rigctl.contract.foreign import one_line


@dataclass(frozen=True)
class Server:
    """A process that listens or holds a GPU. address: "" for a GPU. unit: its systemd unit, "" outside one.

    models: what it serves by its own word, where it listens and answers.
    """

    address: str
    pid: int
    user: str
    unit: str
    command: str
    models: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it belongs to a unit of ours."""
        return self.unit.startswith("kimi-")

    @property
    def host(self) -> str:
        """The address it listens on, without port, zone and brackets; 0.0.0.0 for `*`."""
        return self.address.rpartition(":")[0].strip("[]").partition("%")[0].replace("*", "0.0.0.0")  # noqa: S104  # read

    @property
    def port(self) -> int:
        """The port it listens on; 0 for a GPU."""
        return int(self.address.rpartition(":")[2] or 0)


_WHO = """who() { if [ -d /proc/$1 ]; then
u=$(sed -n 's|.*/\\([^/]*[.]service\\).*|\\1|p' /proc/$1/cgroup 2>/dev/null | tail -n 1)
c=$(tr '\\0\\n|' '   ' < /proc/$1/cmdline 2>/dev/null | tr -cd '[:print:]' | cut -c1-100)
echo "$1|$(stat -c %U /proc/$1)|$u|$c"; else echo '0|||'; fi; }"""

_MODELS = (
    "import urllib.request as u; o = u.build_opener(u.ProxyHandler({})); "
    'print(o.open("http://127.0.0.1:%s/v1/models", timeout=2).read(4096).decode().replace(chr(10), " "))'
)


class Servers(FactBase[list[Server]]):
    """Listeners on the given TCP ports and holders of NVIDIA devices; needs root to name them. Reads only."""

    def command(self, ports: Sequence[int]) -> str:
        wanted = " or ".join(f"sport = :{port}" for port in ports) or "sport = :0"
        listening = (
            f"ss -Hltnp '{wanted}' | while read -r s r q local rest; do "
            'pid=$(echo "$rest" | sed -n "s/.*pid=\\([0-9]*\\).*/\\1/p"); '
            'echo "listens|$local|$(who "${pid:-none}")"; '
            f"echo \"models|$local|$(python3 -c '{_MODELS % '$PORT'}' 2>/dev/null)\"; done"
        ).replace("$PORT", "'${local##*:}'")
        held = (
            "find /proc/[0-9]*/fd -lname '/dev/nvidia[0-9]*' 2>/dev/null | cut -d/ -f3 | sort -un | "
            'while read -r pid; do echo "gpu||$(who $pid)"; done'
        )
        return f"{_WHO}\n{{ {listening}; {held}; }} 2>/dev/null; true"

    default = list

    def process(self, output: Iterable[str]) -> list[Server]:
        found: list[Server] = []
        models: dict[str, tuple[str, ...]] = {}
        for line in output:
            match line.split("|", 5):
                case ["models", address, *answer]:
                    models[address] = _names("|".join(answer))
                case ["listens" | "gpu", address, pid, user, unit, command]:
                    found.append(Server(address, int(pid), user, unit, command.strip()))
        return [
            Server(s.address, s.pid, s.user, s.unit, s.command, models.get(s.address, ())) if s.address else s
            for s in found
        ]


def _names(answer: str) -> tuple[str, ...]:
    try:
        return tuple(one_line(entry["id"], 100) for entry in json.loads(answer)["data"][:4])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
