"""Wheels by the digest of what they are made from: <root>/store/<name>/<digest>/ with the wheel and its receipt."""

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl.contract.kernel_job import KernelJob
from rigctl.errors import RigctlError

RECEIPT = "receipt.json"


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
    """A wheel that another host has put into the shared place; None where that has none. Not yet in the store."""
    if job.kernel_store is None:
        return None
    into = job.root / "fetched" / job.package / digest
    shutil.rmtree(into.parent, ignore_errors=True)  # what an earlier one has left
    into.mkdir(parents=True)
    if _rsync(f"{job.kernel_store}/{job.package}/{digest}/", f"{into}/") is not None:
        return None
    return _read(into, digest)


def publish(job: KernelJob, stored: Stored) -> None:
    """Let other hosts have it: the wheel first, the receipt, by which it counts, last. A failure is only reported."""
    if job.kernel_store is None:
        return
    target = f"{job.kernel_store}/{job.package}/{stored.receipt['digest']}/"
    for file in (stored.wheel, stored.wheel.with_name(RECEIPT)):
        if (why := _rsync(str(file), target)) is not None:
            print(f"{target} could not be written, other hosts build for themselves: {why}", flush=True)
            return


def _rsync(origin: str, target: str) -> str | None:
    """None when it is done, else why not."""
    command = ["rsync", "-a", "--mkpath", "--rsh=ssh -o BatchMode=yes -o ConnectTimeout=10", origin, target]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    except FileNotFoundError:
        raise RigctlError("rsync is not installed on this host: install it and deploy again") from None
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]


def sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
