"""`rigctl doctor`: one archive for a bug report, with secrets masked."""

import argparse
import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.services.status import rows
from rigctl.supervisor.engine_client import CREDENTIAL
from rigctl.supervisor.specification import Specification, installed

MASK = "***"
LOG_BYTES = 2 << 20
# Assignments and headers that carry secrets, and tokens known by their shape.
PATTERNS = (
    re.compile(
        r"(?i)((?:api[-_]?key|token|secret|password|authorization)['\"]?\s*[=:]\s*['\"]?(?:bearer\s+)?)"
        r"(?!null\b|None\b)[^\s'\",}]+"
    ),
    re.compile(r"(?<![\w-])(--[\w-]*(?:key|token|secret|password)[= ])\S+"),
    re.compile(r"(?i)(bearer\s+)[\w.~+/-]{8,}=*"),
    re.compile(r"()\b(?:hf|sk|ghp)[_-][A-Za-z0-9]{16,}\b"),
    re.compile(r"(://)[^/\s:@]+:[^/\s@]+(?=@)"),
)
COMMANDS = {
    "system.txt": ["uname", "-a"],
    "os-release.txt": ["cat", "/etc/os-release"],
    "memory.txt": ["free", "-m"],
    "disk.txt": ["df", "-h"],
    "gpus.txt": ["nvidia-smi"],
    "gpu-topology.txt": ["nvidia-smi", "topo", "-m"],
    "receipt.json": ["cat", layout.RECEIPT],
    "units.txt": ["systemctl", "list-units", "--all", "kimi-*"],
    "fallback.txt": ["journalctl", "--no-pager", "-n", "100", "-u", "kimi-fallback@*"],
    "kernel.txt": ["sh", "-c", "dmesg | grep -iE 'nvrm|xid|oom|killed process' | tail -n 200"],
}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("doctor", help="pack what a bug report needs, secrets masked")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parser.add_argument("--output", type=Path, default=Path(f"kimi-rig-doctor-{stamp}.tar.gz"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the archive. Raises RigctlError when it cannot be written."""
    secrets = known_secrets(CREDENTIAL.parent)
    try:
        # Closed to others from its first byte, and never through a link.
        descriptor = os.open(arguments.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in _content():
                _add(archive, name, masked(text, secrets))
    except OSError as error:
        raise RigctlError(f"{arguments.output} cannot be written: {error.strerror}") from None
    print(f"{arguments.output} holds status, units, logs and the host's facts; secrets are masked")
    return 0


def known_secrets(directory: Path) -> list[str]:
    """The secrets of this host, to be masked wherever they turn up."""
    files = (path for path in sorted(directory.glob("*")) if path.is_file())
    return [text for path in files if (text := path.read_text(errors="replace").strip())]


def masked(text: str, secrets: Iterable[str]) -> str:
    """`text` without the known secrets and whatever looks like one."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def _content() -> Iterator[tuple[str, str]]:
    for name, command in COMMANDS.items():
        yield name, _output(command)
    yield "status.json", json.dumps(rows(), indent=2)
    for path in sorted(Path(layout.CONFIGURATIONS).glob("*.json")):
        yield f"{path.stem}/specification.json", path.read_text(errors="replace")
    for specification in installed():
        yield from _of(specification)


def _of(specification: Specification) -> Iterator[tuple[str, str]]:
    unit = specification.unit
    yield f"{specification.name}/unit.txt", _output(["systemctl", "cat", unit])
    yield f"{specification.name}/properties.txt", _output(["systemctl", "show", unit])
    yield f"{specification.name}/journal.txt", _output(["journalctl", "--no-pager", "-n", "2000", "-u", unit])
    for name in specification.logs.names(".log")[-2:]:
        try:
            with specification.logs.open(name) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                text = (file.read(LOG_BYTES) or b"").decode(errors="replace")
        except OSError as error:
            text = f"not packed: {error.filename}: {error.strerror}\n"
        yield f"{specification.name}/{name}", text


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return done.stdout + done.stderr


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(f"kimi-rig-doctor/{name}")
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
    archive.addfile(info, io.BytesIO(data))
