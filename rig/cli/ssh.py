"""The one way to a host, for every verb: what the inventory and the operator's ssh_config say, resolved by OpenSSH.

paramiko, which pyinfra connects with, reads ssh_config in its own way: it takes an Include inside a Host block for one
of the whole file, and a jump host's own settings for nothing. So OpenSSH resolves each host (`ssh -G`), and
pyinfra, `make verify` and `make status` read the flat file that comes of it.
"""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

RESOLVE_SECONDS = 20
MOST_BLOCKS = 32768
"""Of 512 or 1,024 bytes (ulimit -f of the shell at hand): what is read of a host's answer."""
DATA_OPTIONS = {
    "Port": "ssh_port",
    "User": "ssh_user",
    "IdentityFile": "ssh_key",
    "UserKnownHostsFile": "ssh_known_hosts_file",
}
"""Options of ssh_config by the host data that overrides them, as it does in pyinfra."""
KEPT = ("HostName", "Port", "User", "CertificateFile", "IdentitiesOnly", "IdentityAgent", "ServerAliveInterval")
HOP = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class WayError(Exception):
    """OpenSSH cannot resolve a host; the message says why."""


def alias(name: str) -> str:
    """The host's name in the flat file, fit for every program: no colon, no slash, no dash at its start."""
    return re.sub(r"^(?=-)", "host", re.sub(r"[^\w.-]", "-", name))


def config_words(data: Mapping[str, Any]) -> list[str]:
    """Options that name the operator's ssh_config, where it is not the usual one."""
    return ["-F", str(data["ssh_config_file"])] if data.get("ssh_config_file") else []


@cache
def _resolved(words: tuple[str, ...]) -> dict[str, list[str]]:
    """What `ssh -G` says: option in lower case -> values. Raises WayError."""
    try:
        done = subprocess.run(
            ["ssh", "-G", *words],
            capture_output=True,
            check=True,
            timeout=RESOLVE_SECONDS,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise WayError(error.stderr.strip()) from None
    except subprocess.TimeoutExpired:
        raise WayError(f"a command in the ssh_config gave no answer in {RESOLVE_SECONDS} s") from None
    except OSError as error:
        raise WayError(f"ssh cannot be run ({error.strerror}): install OpenSSH's client") from None
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def host_block(name: str, data: Mapping[str, Any], folder: Path) -> str:
    """One host's part of the flat file; its proxy becomes a script in `folder`. Raises WayError."""
    target = str(data.get("ssh_hostname") or name)
    given = {option: str(data[key]) for option, key in DATA_OPTIONS.items() if data.get(key)}
    words = [*config_words(data), *(word for key, value in given.items() for word in ("-o", f'{key}="{value}"'))]
    found = _resolved((*words, "--", target))
    lines = [f"{option} {found[option.lower()][0]}" for option in KEPT if option.lower() in found]
    # The default keys are tried in any case; named here, pyinfra would take the first for the only one.
    keys = found.get("identityfile", [])
    if keys != _resolved(("-F", "none", "--", target)).get("identityfile"):
        lines += [f'IdentityFile "{key}"' for key in keys]
    known = given.get("UserKnownHostsFile")
    # paramiko reads no other files than these.
    shared = [one for one in " ".join(found.get("globalknownhostsfile", [])).split() if Path(one).is_file()]
    files = [f'"{known}"' if known else found["userknownhostsfile"][0], *shared]
    lines.append(f"UserKnownHostsFile {' '.join(files)}")
    # Secrets travel: who answers is known before, unless the inventory says otherwise in as many words.
    strict = "accept-new" if data.get("ssh_strict_host_key_checking") == "accept-new" else "yes"
    lines.append(f"StrictHostKeyChecking {strict}")
    if proxy := _proxy(found, data, target):
        # A file: paramiko starts a proxy without a shell, and the two take % for different things.
        script = folder / f"proxy-{alias(name)}.sh"
        script.write_text(f"exec {proxy}\n", encoding="utf-8")
        lines.append(f"ProxyCommand sh {script}")
    return "".join(
        [f"Host {' '.join(dict.fromkeys((alias(name), name, target)))}\n", *(f"  {line}\n" for line in lines)]
    )


def _proxy(found: Mapping[str, Sequence[str]], data: Mapping[str, Any], target: str) -> str:
    """The command whose standard input and output are the connection; empty for a direct one. Tokens are filled in."""
    address, port, user = (found[key][0] for key in ("hostname", "port", "user"))
    jump = found.get("proxyjump", ["none"])[0]
    if jump != "none":
        # As OpenSSH does it itself, so that the hop's own settings hold.
        return shlex.join(_through(config_words(data), jump.split(","), f"[{address}]:{port}"))
    command = found.get("proxycommand", ["none"])[0]
    tokens = {"%%": "%", "%h": address, "%n": target, "%p": port, "%r": user}
    return "" if command == "none" else re.sub("%[%hnpr]", lambda match: tokens[match[0]], command)


def _through(config: Sequence[str], hops: Sequence[str], to: str) -> list[str]:
    """The command that connects to an address by way of hops, the first of them reached from here."""
    *earlier, last = hops
    before = shlex.join(_through(config, earlier, "[%h]:%p")) if earlier else ""
    return ["ssh", *config, *HOP, *(["-o", f"ProxyCommand={before}"] if before else []), "-W", to, *_hop(last)]


def _hop(jump: str) -> list[str]:
    """OpenSSH's words for a jump host: [user@]host[:port] or an ssh:// URI."""
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<v6>.+)\]|(?P<host>[^:]+|.*:.*:.*))(?::(?P<port>\d+))?/?", jump
    )
    if match is None:
        return [jump]
    options = [word for flag, key in (("-l", "user"), ("-p", "port")) if match[key] for word in (flag, match[key])]
    return [*options, match["v6"] or match["host"]]


def write_config(hosts: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Write the flat file of these hosts; their files of known hosts are there afterwards. Raises WayError.

    hosts: as `debug-inventory --json` gives them.
    """
    blocks = []
    for host in hosts:
        if host["name"].startswith("@"):  # no machine behind it, or this one
            continue
        try:
            blocks.append(host_block(host["name"], host["data"], file.parent))
        except WayError as error:
            raise WayError(f"{host['name']}: {error}") from None
        for line in re.findall(r"(?m)^  UserKnownHostsFile (.*)$", blocks[-1]):
            _touch(Path(shlex.split(line)[0]).expanduser())
    file.write_text("".join(blocks), encoding="utf-8")


def _touch(known_hosts: Path) -> None:
    """Make a file of known hosts as ssh does: without it pyinfra fails on the first new host, naming only the path."""
    with suppress(OSError):
        known_hosts.parent.mkdir(mode=0o700, exist_ok=True)
        known_hosts.touch(mode=0o600)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    # Sockets of shared connections lie there too: 61 bytes after this name, of 107 that a path may have (unix(7)).
    long = len(os.fsencode(tempfile.gettempdir())) > 20
    return tempfile.TemporaryDirectory(prefix="kimi-rig-ssh-", dir="/tmp" if long else None)  # noqa: S108  # made for us


def config_of(hosts: Sequence[Mapping[str, Any]]) -> Path:
    """The flat file of these hosts, until this process ends. Raises WayError."""
    file = Path(_scratch().name, "config")
    write_config(hosts, file)
    return file


ASK = """#!/bin/sh
printf '%s\\n' "$1" >&2
echo no
"""


def refused(file: Path, name: str, said: str, accept: str) -> str:
    """Why OpenSSH does not reach a host, from its messages: the last, or for an unknown host key what to do.

    accept: the command by which the operator accepts it.

    OpenSSH shows a fingerprint only where it asks, so it is asked, and the answer is no.
    """
    last = (said.strip().splitlines() or ["no word of why"])[-1].strip()
    if "Host key verification failed" not in last or "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        return last
    script = file.with_name("ask.sh")
    script.write_text(ASK, encoding="utf-8")
    script.chmod(0o700)
    program, *rest = words(file, name)
    asking = ["-o", "BatchMode=no", "-o", "NumberOfPasswordPrompts=0", "-o", "StrictHostKeyChecking=ask"]
    done = subprocess.run(
        [program, *asking, *rest, "true"],
        capture_output=True,
        errors="replace",
        timeout=RESOLVE_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "SSH_ASKPASS": str(script), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":none"},
    )
    shown = re.search(r"(\S+) key fingerprint is:? (SHA256:\S+?)\.?$", done.stderr, re.MULTILINE)
    kind, fingerprint = shown.groups() if shown else ("ED25519", "")
    return unknown_key(kind, fingerprint, accept)


def unknown_key(kind: str, fingerprint: str, accept: str) -> str:
    """The message about a host whose key is in no file of known hosts."""
    return (
        f"its host key {kind} {fingerprint} is not known, so nothing was sent to it: compare the fingerprint with what "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind.lower()}_key.pub` says on the host's console, then run `{accept}`"
    )


def words(file: Path, name: str, *options: str) -> list[str]:
    """OpenSSH's command line for a host of the flat file. It asks for nothing and does not wait for ever."""
    return ["ssh", "-F", str(file), *HOP, *options, alias(name)]


def limited(
    command: Sequence[str], given: bytes = b"", seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that asks a host, which may answer without end: then it is ended, by SIGXFSZ.

    given: its input. Raises subprocess.TimeoutExpired, OSError.
    """
    capped = ["sh", "-c", f'ulimit -f {MOST_BLOCKS}; exec "$@"', "sh", *command]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        code = subprocess.run(
            capped, input=given, stdout=said, stderr=complained, timeout=seconds, check=False
        ).returncode
        for file in (said, complained):
            file.seek(0)
        return subprocess.CompletedProcess(capped, code, said.read(), complained.read())
