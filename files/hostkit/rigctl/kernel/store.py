"""Wheels by the digest of what they are made from: <root>/store/<name>/<digest>/ with the wheel and its receipt.

The store is root's: its receipts are believed. The shared place (kernel_store) is not.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl import builder
from rigctl.contract.kernel_job import KernelJob
from rigctl.errors import RigctlError

RECEIPT = "receipt.json"
WHEEL = re.compile(r"\w[\w.+!-]*\.whl")
OFFERED = 4
"""Wheels of one digest that are looked at: there is one."""
WHEELS_ALONE = ("-r", "--no-links", "--chmod=D0755,F0644", "--max-size=8G", "--include=*.whl", "--exclude=*")
"""Of rsync: files alone, with none of the other side's owners and modes."""


@dataclass(frozen=True)
class Stored:
    """A wheel in the store, as proved when it was put there."""

    wheel: Path
    receipt: dict[str, Any]


def folder(job: KernelJob, digest: str) -> Path:
    return job.root / "store" / job.package / digest


def find(job: KernelJob, digest: str) -> Stored | None:
    """The whole wheel with this digest; None where there is none, or a damaged one, which `put` replaces. Only reads:
    a plan asks too.
    """
    return _read(folder(job, digest), digest)


def _read(place: Path, digest: str) -> Stored | None:
    try:
        receipt: dict[str, Any] = json.loads((place / RECEIPT).read_text())
        wheel = place / str(receipt["wheel"])
        if receipt["digest"] == digest and sha256(wheel) == receipt["sha256"]:
            return Stored(wheel, receipt)
        reason = "its wheel is not the one of its receipt"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    print(f"{place}: damaged ({reason}), it is made again", flush=True)
    return None


def put(job: KernelJob, digest: str, wheel: Path, receipt: dict[str, Any]) -> Stored:
    """Put a proved wheel into the store, whole or not at all."""
    place = folder(job, digest)
    scratch = place.with_name(f".{place.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    shutil.copy2(wheel, scratch / wheel.name)
    whole = {**receipt, "digest": digest, "wheel": wheel.name, "sha256": sha256(scratch / wheel.name)}
    (scratch / RECEIPT).write_text(json.dumps(whole, indent=2) + "\n")
    os.sync()
    shutil.rmtree(place, ignore_errors=True)
    scratch.rename(place)
    return Stored(place / wheel.name, whole)


def fetch(job: KernelJob, digest: str) -> Stored | None:
    """A wheel from the shared place, where it is one of those that the order names; None where there is none.

    What others can write proves nothing: of what lies there only a wheel is read, and used only by the sha256 that the
    release's kernel names (`shared_wheels`). Not yet in the store.
    """
    if job.kernel_store is None:
        return None
    into = job.root / "fetched" / job.package / digest
    shutil.rmtree(into.parent, ignore_errors=True)  # what an earlier one has left
    into.mkdir(parents=True)
    for name in _offered(job, digest, into):
        found = sha256(into / name)
        if found in job.shared_wheels:
            return Stored(into / name, {"fetched_from": job.kernel_store})
        print(
            f"{name} of {job.kernel_store} is not used: nobody vouches for it. If a host of yours built it, name its "
            f"sha256 in shared_wheels of the release's kernel: {found}",
            flush=True,
        )
    return None


def _offered(job: KernelJob, digest: str, into: Path) -> list[str]:
    """Copy the wheels that the shared place has for these inputs; their names."""
    place, here = str(job.kernel_store), f"{job.package}/{digest}"
    if ":" in place:
        if _rsync(f"{place}/{here}/", f"{into}/", *WHEELS_ALONE) is not None:
            return []
    else:
        try:
            names = sorted(path.name for path in Path(place, here).iterdir() if WHEEL.fullmatch(path.name))
            for name in names[:OFFERED]:
                builder.copied(Path(place), f"{here}/{name}", into / name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RigctlError(f"{error.filename}: {error.strerror}: kernel_store cannot be read") from None
    return sorted(path.name for path in into.iterdir() if WHEEL.fullmatch(path.name))[:OFFERED]


def publish(job: KernelJob, stored: Stored) -> None:
    """Let other hosts have it: the wheel first, the receipt last. A failure is only reported."""
    if job.kernel_store is None:
        return
    here = f"{job.package}/{stored.receipt['digest']}"
    why: str | None = None
    for file in (stored.wheel, stored.wheel.with_name(RECEIPT)):
        if ":" in job.kernel_store:
            why = why or _rsync(str(file), f"{job.kernel_store}/{here}/", "-a", "--mkpath")
        else:
            why = why or _put(Path(job.kernel_store), here, file)
    if why is not None:
        print(f"{job.kernel_store}/{here} could not be written, other hosts build for themselves: {why}", flush=True)
        return
    print(
        f"other hosts take it from {job.kernel_store} once the release's kernel names it: shared_wheels: "
        f"[{stored.receipt['sha256']}]",
        flush=True,
    )


def _put(place: Path, below: str, file: Path) -> str | None:
    """Write a file below a directory in which others may write; None when it is done, else why not."""
    folder = -1
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        for part in below.split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            above, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(above)
        new = f".{file.name}.{secrets.token_hex(8)}"
        made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        with os.fdopen(made, "wb") as copy, file.open("rb") as content:
            shutil.copyfileobj(content, copy)
        os.rename(new, file.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        return str(error.strerror)
    finally:
        if folder >= 0:
            os.close(folder)
    return None


def _rsync(origin: str, target: str, *options: str) -> str | None:
    """None when it is done, else why not."""
    ssh = "--rsh=ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10"
    command = ["rsync", *options, ssh, origin, target]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    except FileNotFoundError:
        raise RigctlError("rsync is not installed on this host: install it and deploy again") from None
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]


def sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
