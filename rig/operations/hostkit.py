"""The program that lives on the host (rigctl), in an environment of its own that no engine shares."""

import gzip
import hashlib
import io
import shlex
import tarfile
from functools import cache
from pathlib import Path

from pyinfra import host
from pyinfra.api import operation

from rig.catalog.entries import ROOT
from rig.facts.state import Lines
from rig.operations import jobs
from rig.operations.common import Commands, note, remember, script
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.sources import GeneratorSource

SOURCE = ROOT / "files" / "hostkit"
GENERATOR = "tiny_models"
"""Package of rigctl that makes tiny models. Only hosts with a generated checkpoint get it."""


def hostkit_files(plan: HostPlan) -> tuple[Path, ...]:
    """What is copied to the host, in the order that sort(1) gives in the C locale."""
    left_out = {"__pycache__"}
    if not any(isinstance(entry.source, GeneratorSource) for entry in plan.checkpoints.values()):
        left_out.add(GENERATOR)
    found = [path for path in SOURCE.rglob("*") if path.is_file() and left_out.isdisjoint(path.parts)]
    return tuple(sorted(found, key=lambda path: str(path.relative_to(SOURCE))))


def _mode(path: Path) -> int:
    return 0o755 if path.parent.name == "bin" else 0o644


@cache
def content_digest(files: tuple[Path, ...]) -> str:
    """What CONTENT prints on a host whose files are as they were installed: sha256 over modes, names and digests."""
    names = {path: f"./{path.relative_to(SOURCE)}" for path in files}
    lines = sorted(f"{_mode(path):o} {name}" for path, name in names.items())
    lines += [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}" for path, name in names.items()]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


_FOUND = "find . -type f ! -path '*/__pycache__/*' ! -name complete"
CONTENT = (
    f"export LC_ALL=C; {{ {_FOUND} -printf '%m %p\\n' | sort; {_FOUND} | sort | xargs -r sha256sum; }} | "
    "sha256sum | cut -d' ' -f1"
)
"""Shell: the digest of the files in the present directory."""


@cache
def hostkit_archive(files: tuple[Path, ...]) -> bytes:
    """The files as a tar.gz whose bytes depend on nothing but their names and content."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in files:
            info = tarfile.TarInfo(str(path.relative_to(SOURCE)))
            info.size, info.mode = path.stat().st_size, _mode(path)
            with path.open("rb") as content:
                tar.addfile(info, content)
    return buffer.getvalue()


def hostkit_path(plan: HostPlan) -> str:
    """Where this version of hostkit is installed: named by the digest of its files."""
    return f"{layout.HOSTKIT}/{hashlib.sha256(hostkit_archive(hostkit_files(plan))).hexdigest()[:12]}"


@operation()
def installed(plan: HostPlan) -> Commands:
    """This version of hostkit is complete on the host and is the current one."""
    files, path, wheels = hostkit_files(plan), hostkit_path(plan), plan.data.wheels
    current = f"{layout.HOSTKIT}/current"
    proof = f"[ -e {path}/complete ]"
    state = host.get_fact(
        Lines, script=f"{proof} && cd {path} && echo complete && {{ {CONTENT}; }}; readlink {current}"
    )
    if state == ["complete", content_digest(files), path]:
        host.noop(f"hostkit {path.rpartition('/')[2]} is the current one")
        return
    changed = "complete" in state and content_digest(files) not in state
    why = "was changed on the host and is installed again" if changed else "is installed"
    note(f"hostkit {path.rpartition('/')[2]} {why}")
    if "complete" not in state or changed:
        unit = f"kimi-job-hostkit-{path.rpartition('/')[2]}"
        # A half-made one is made anew: `complete` is written last. Not under a job that is at work in it.
        unpack = f"rm -rf {path}; mkdir -p {path}; base64 -d | tar -xz --no-same-owner -C {path}"
        yield script(
            remember("tree", layout.HOSTKIT),
            f"systemctl is-active -q {unit} || {{ {unpack}; }}",
            content=hostkit_archive(files),
        )
        yield from jobs.run(
            jobs.LongJob(
                unit=unit,
                argv=["sh", f"{path}/install.sh", path],
                proof=proof,
                writes=[layout.HOSTKIT],
                network="any",
                limit_seconds=1200,
                environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels} if wheels else {},
                # pip's settings (indexes, wheel directories, CA bundle) are the machine's own.
                properties=["EnvironmentFile=-/etc/environment"],
            )
        )
    yield script(
        f"ln -sfn {shlex.quote(path)} {current}.new",
        f"mv -fT {current}.new {current}",
        f"cd {layout.HOSTKIT}",
        # The two versions before stay, and any from which a process still runs: a service that no deploy has restarted.
        "running=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' || true)",
        f"for v in $(ls -1dt ????????????/ | grep -v {path.rpartition('/')[2]} | tail -n +3); do "
        f'case "$running" in *"{layout.HOSTKIT}/${{v%/}}"*) ;; *) rm -rf "$v";; esac; done',
        # Environments that no version needs go.
        "for e in venv-*; do readlink */venv | grep -q $e || rm -rf $e; done",
    )
