"""Where a box keeps its things, and how it is reached."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_NAME = "sandbox"
DEFAULT_PORT = 2222
ADDRESS = "127.0.0.1"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_LOGIN = re.compile(r"[a-z_][a-z0-9_-]{0,30}")


class SandboxError(RigctlError):
    """A failure the operator can act on: says what is wrong, where, and what to do."""


def base_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of all boxes: KIMI_RIG_SANDBOX_DIR, or `.sandbox` in the repository."""
    return Path(environ.get("KIMI_RIG_SANDBOX_DIR") or REPOSITORY / ".sandbox").absolute()


def port_from(text: str) -> int:
    """A TCP port number out of `text`; SandboxError when it is none."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise SandboxError(f"KIMI_RIG_SANDBOX_PORT: {text!r} is no port number; give one of 1 to 65535")
    return int(text)


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Put `text` at `path` in one step; a link at `path` is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    temporary.replace(path)


@dataclass(frozen=True)
class State:
    """What is remembered of a box between two commands (`state.json`)."""

    port: int = DEFAULT_PORT
    login: str = "root"
    pid: int = 0  # of the process that keeps the box (keeper.sh or systemd-nspawn); 0: none
    started: int = 0  # its start time in clock ticks since boot, field 22 of /proc/PID/stat
    binds: tuple[str, ...] = ()


class _Inside:
    """A path in the directory of a box."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, box: "Box", _: type) -> Path:
        return box.directory / self._name


@dataclass(frozen=True)
class Box:
    """One box by name. Only paths and recorded facts: every property works when the box does not exist."""

    name: str = DEFAULT_NAME
    base: Path = field(default_factory=base_directory)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SandboxError(f"--name: {self.name!r} is no box name; use a-z, 0-9 and -, a letter first")

    @property
    def directory(self) -> Path:
        return self.base / self.name

    @property
    def unit(self) -> str:
        """Name of the box's machine, unit and control group: boxes in other directories have others."""
        return f"kimi-rig-{self.name}-{hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]}"

    @property
    def lock(self) -> Path:
        return self.base / f".{self.name}.lock"

    root = _Inside("root")
    """The box's file system."""
    marker = _Inside(".kimi-rig-box")
    """Says that the directory is ours to delete."""
    stamp = _Inside("built.json")
    """Written last by a build; without it the root is half made."""
    key = _Inside("id_ed25519")
    host_key = _Inside("host_ed25519")
    known_hosts = _Inside("known_hosts")
    ssh_config = _Inside("ssh_config")
    limits = _Inside("limits.json")
    """Which limits the box enforces, see `rig.sandbox.limits`."""
    console = _Inside("console.log")

    def state(self) -> State:
        """The recorded state, or the defaults when there is none."""
        try:
            content: dict[str, Any] = json.loads((self.directory / "state.json").read_text(encoding="utf-8"))
            known = {item.name for item in dataclasses.fields(State)}
            state = State(**{key: value for key, value in content.items() if key in known})
        except (FileNotFoundError, NotADirectoryError):
            return State()
        except (ValueError, TypeError, AttributeError) as error:
            raise SandboxError(
                f"{self.directory / 'state.json'} cannot be read ({error}); delete this file, then `make sandbox`"
            ) from None
        return dataclasses.replace(state, binds=tuple(state.binds))

    def save(self, state: State) -> None:
        write_atomic(self.directory / "state.json", json.dumps(dataclasses.asdict(state), indent=2) + "\n")

    def planned(self, environ: Mapping[str, str] = os.environ, login: str | None = None) -> State:
        """The recorded state with the port and login asked for now (KIMI_RIG_SANDBOX_PORT, `--user`)."""
        state = self.state()
        if login is not None and not _LOGIN.fullmatch(login):
            raise SandboxError(f"--user: {login!r} is no user name")
        if login is not None and self.stamp.exists() and login != state.login:
            raise SandboxError(
                f"--user: box {self.name} was made for {state.login}, not {login}; "
                "remove it first, or use another --name"
            )
        asked = environ.get("KIMI_RIG_SANDBOX_PORT")
        return dataclasses.replace(state, port=port_from(asked) if asked else state.port, login=login or state.login)

    def host_data(self) -> dict[str, str | int]:
        """Data of pyinfra's SSH connector for this box; the host key is always checked.

        `ssh_config_file` is the box's own, so that nothing in the user's ~/.ssh/config applies.
        """
        state = self.state()
        return {
            "ssh_hostname": ADDRESS,
            "ssh_port": state.port,
            "ssh_user": state.login,
            "ssh_key": str(self.key),
            "ssh_config_file": str(self.ssh_config),
            "ssh_known_hosts_file": str(self.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }

    def ssh_command(self, *command: str) -> list[str]:
        """Argv of OpenSSH's client that runs `command` in the box."""
        return ["ssh", "-F", str(self.ssh_config), self.name, *(("--", *command) if command else ())]

    def ssh_settings(self, state: State) -> dict[Path, str]:
        """Content of the box's ssh_config, of the one that includes every box's, and of known_hosts."""
        public_host_key = " ".join(self.host_key.with_suffix(".pub").read_text(encoding="utf-8").split()[:2])
        options = {
            "HostName": ADDRESS,
            "Port": state.port,
            "User": state.login,
            "IdentityFile": f'"{self.key}"',
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": f'"{self.known_hosts}"',
            "GlobalKnownHostsFile": "none",
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": 5,
            "LogLevel": "ERROR",
        }
        lines = [f"Host {self.name}", *(f"  {key} {value}" for key, value in options.items())]
        return {
            self.ssh_config: "\n".join(lines) + "\n",
            self.base / "ssh_config": f'Include "{self.base}/*/ssh_config"\n',
            self.known_hosts: f"[{ADDRESS}]:{state.port} {public_host_key}\n",
        }
