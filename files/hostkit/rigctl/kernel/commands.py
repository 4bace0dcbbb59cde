"""The subcommands of `rigctl kernel`."""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rigctl import builder, lock_files
from rigctl.contract import layout
from rigctl.contract.kernel_job import KernelJob
from rigctl.engines.installed import distributions, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import build, cubins, install, requirements, steps, store, toolchain
from rigctl.kernel.children import end_with_us
from rigctl.own_process import own_process

WAIT_SECONDS = 12 * 3600
"""For another build of the same kernel: the limit of its job (rig/operations/kernel_wheels.py)."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `kernel` to the command line."""
    parser = subparsers.add_parser("kernel", help="build, prove and install an engine's CUDA kernel wheel")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("plan", plan, "what a build lacks, compiles and takes; builds nothing (exit code 1: something is missing)"),
        ("ensure", ensure, "build what is missing and install it"),
        ("status", status, "what is installed, and whether it is what it should be (exit code 1: it is not)"),
        ("stock", stock, "go back to the wheel of the release's lock"),
        ("receipt", receipt, "from what the installed wheel was built"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("release", help="name of a release with a kernel, or path of an order")
        action.add_argument("--json", action="store_true")
        action.set_defaults(run=run)
        if run is plan:
            action.add_argument("--configure", action="store_true", help="make the toolchain, if it is not there")
    prove = actions.add_parser("prove", help="which GPUs the code in a wheel or environment is for")
    prove.add_argument("path", type=Path, help="a wheel, a library, or a directory of libraries")
    prove.add_argument("--cuobjdump", type=Path, required=True)
    prove.add_argument(
        "--only", action="append", default=[], metavar="CAPABILITY", help="such as 12.0; no other may be in it"
    )
    prove.set_defaults(run=prove_path)


def read_job(release: str) -> KernelJob:
    """The order for a release, by its name or by the path of its file. Raises RigctlError."""
    os.umask(0o022)  # what root makes for it the builder reads, whatever the login's is
    folder = Path(layout.KERNELS)
    path = Path(release) if "/" in release else folder / f"{release}.json"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.json"))) or "none"
        raise RigctlError(f"{path}: no such file (releases with a kernel on this host: {known})")
    return KernelJob.read(path)


# What is there


def examine(job: KernelJob) -> dict[str, Any]:
    """State of a kernel: "installed", "wheel" (the stock one, proved), or what is to be done, in "state" and "why"."""
    site = site_packages(job.engine.path)
    there = {each.name: each.version for each in distributions(site)}.get(normalised(job.package))
    known = install.record(job)
    answer: dict[str, Any] = {"package": job.package, "version": there, "mode": job.mode}
    if not toolchain.ready(job):
        return answer | {"state": "missing", "why": "there is no toolchain yet"}
    if job.mode == "wheel":
        return answer | _examine_stock(job, known)
    digest = steps.inputs(job).digest
    answer["digest"] = digest
    stored = store.find(job, digest)
    if stored is None:
        ours = (
            f"the installed one was made from other inputs ({known['digest']})"
            if known.get("digest")
            else "none is built"
        )
        return answer | {"state": "missing", "why": ours}
    wrong = install.differs(stored.wheel, site)
    if wrong is None and known.get("digest") == digest:
        return answer | {"state": "installed", "why": ""}
    if known.get("digest") == digest:
        return answer | {"state": "replaced", "why": f"something put another {job.package} over ours: {wrong}"}
    return answer | {"state": "built", "why": "built, not installed"}


def _examine_stock(job: KernelJob, known: dict[str, Any]) -> dict[str, Any]:
    if known.get("mode") != "wheel":
        return {
            "state": "missing",
            "why": "the lock's wheel is not proved" if not known else "another wheel is installed",
        }
    if known["architectures"] != cubins.wanted(job.architectures) or known["record"] != _stock_record(job):
        return {"state": "missing", "why": "the proof is of another wheel or GPU"}
    return {"state": "wheel", "why": ""}


def _stock_record(job: KernelJob) -> str:
    """Digest of the installed package's RECORD; "" where it is not installed."""
    for each in distributions(site_packages(job.engine.path)):
        if each.name == normalised(job.package):
            return store.sha256(each.dist_info / "RECORD")
    return ""


def status(arguments: argparse.Namespace) -> int:
    """Exit code 0 when the kernel is what it should be, else 1."""
    job = read_job(arguments.release)
    try:
        found = examine(job)
    except RigctlError as error:
        found = {"package": job.package, "mode": job.mode, "state": "wrong", "why": str(error)}
    if arguments.json:
        print(json.dumps(found))
    else:
        why = f": {found['why']}" if found["why"] else ""
        print(f"{found['package']} {found.get('version') or ''}: {found['state']}{why}")
    return 0 if found["state"] in ("installed", "wheel") else 1


def plan(arguments: argparse.Namespace) -> int:
    """Print what a build would lack, compile and take; exit code 1 when it cannot be done here."""
    job = read_job(arguments.release)
    if job.mode == "wheel":
        print(f"{job.package}: mode is wheel, nothing is built")
        return 0
    # Before the first deploy has made it, there is nothing to be alone in.
    with end_with_us(), _alone(job, wait=False) if job.root.exists() else nullcontext():
        if arguments.configure and not steps.ask(job, "missing"):
            toolchain.provide(job)
        found = steps.looked(job, serving=bool(serving_units()))
    print(json.dumps(asdict(found)) if arguments.json else "\n".join(found.lines()))
    return 1 if found.missing or found.beyond else 0


# What is done


@contextmanager
def _alone(job: KernelJob, *, wait: bool = True) -> Iterator[None]:
    """One build of a kernel at a time on a host. Raises RigctlError where another is at work and we do not wait."""
    lock, what = job.root / f".{job.package}.lock", f"another build of {job.package} is at work"
    if wait and lock_files.is_locked(lock):
        print(f"{what}: waiting for it", flush=True)
    with lock_files.locked(lock, f"{what}: `journalctl` has its progress", WAIT_SECONDS if wait else 0):
        yield


def ensure(arguments: argparse.Namespace) -> int:
    """Do what `examine` finds missing; nothing when nothing is."""
    job = read_job(arguments.release)
    with end_with_us(), _alone(job):
        if job.mode == "source":
            requirements.refuse(job, map(str, steps.ask(job, "missing")))
        toolchain.provide(job)
        if job.mode == "wheel":
            return _ensure_stock(job)
        inputs = steps.inputs(job)
        stored = store.find(job, inputs.digest) or _fetched(job, inputs) or _built(job, inputs)
        if (
            install.differs(stored.wheel, site_packages(job.engine.path))
            or install.record(job).get("digest") != inputs.digest
        ):
            install.check_version(job, stored.wheel)
            install.check_free(job)
            steps.ask(job, "try", str(stored.wheel))
            install.install(job, stored.wheel, inputs.digest)
        print(f"{job.package} is what it should be ({inputs.digest})")
    return 0


def _fetched(job: KernelJob, inputs: build.Inputs) -> store.Stored | None:
    found = store.fetch(job, inputs.digest)
    if found is None:
        return None
    held = steps.held(job, "prove", found.wheel)
    print(f"{found.wheel.name} was fetched from {job.kernel_store}", flush=True)
    return store.put(job, inputs.digest, found.wheel, _receipt(job, inputs, cubins=held, **found.receipt))


def _built(job: KernelJob, inputs: build.Inputs) -> store.Stored:
    serving = serving_units()
    if serving and job.while_serving == "refuse":
        raise RigctlError(
            f"{', '.join(serving)} serves: a build would slow it down; stop it, or set while_serving: share in the "
            "release's kernel"
        )
    folder, made = steps.made(job, inputs, serving=bool(serving))
    took = made.figures
    with tempfile.TemporaryDirectory(prefix=".taken-", dir=job.root) as scratch:
        wheel = Path(scratch, made.wheel)
        builder.copied(job.root, str((folder / made.wheel).relative_to(job.root)), wheel)
        stored = store.put(job, inputs.digest, wheel, _receipt(job, inputs, **took.model_dump()))
    steps.ask(job, "forget", inputs.digest)
    print(
        f"{stored.wheel.name}: built in {took.seconds:.0f} s, {took.compiled} files compiled, "
        f"{stored.wheel.stat().st_size / 1e6:.1f} MB, peak {took.peak_mib} MiB",
        flush=True,
    )
    store.publish(job, stored)
    return stored


def _receipt(job: KernelJob, inputs: build.Inputs, **more: Any) -> dict[str, Any]:
    host, at = socket.gethostname(), int(time.time())
    return {**more, "name": job.package, "inputs": inputs.values, "host": host, "at": at}


def serving_units() -> list[str]:
    """Units of ours that serve now; none where systemd is not."""
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating", "kimi-*.service"]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    except FileNotFoundError:
        return []
    units = [line.split()[0] for line in done.stdout.splitlines() if line.split()]
    return [
        unit for unit in units if not unit.startswith(("kimi-job-", "kimi-acs", "kimi-power-limit", "kimi-restart-"))
    ]


def _ensure_stock(job: KernelJob) -> int:
    known = install.record(job)
    if known.get("mode") == "source":
        install.restore(job)
    wanted = cubins.wanted(job.architectures)
    site = site_packages(job.engine.path)
    found = [each for each in distributions(site) if each.name == normalised(job.package)]
    if not found:
        raise RigctlError(
            f"{job.engine.path}: no {job.package} in it, and the kernel's mode is wheel: correct the package"
        )
    held = steps.held(job, "stock")
    if reasons := list(cubins.objections(held, wanted, job.libraries, only=False)):
        raise RigctlError(
            f"the stock {job.package} {found[0].version} is not for this host's GPU ({', '.join(wanted)}): "
            f"{'; '.join(reasons)}; set the kernel's mode to source"
        )
    install.write_record(
        job,
        mode="wheel",
        package=found[0].name,
        version=found[0].version,
        architectures=wanted,
        record=_stock_record(job),
        cubins=held,
    )
    print(f"{job.package} {found[0].version} of the lock holds code for {', '.join(wanted)}")
    return 0


def stock(arguments: argparse.Namespace) -> int:
    """Back to the lock's wheel, in one step. The next deploy does what the release's data says."""
    job = read_job(arguments.release)
    with end_with_us(), _alone(job):
        install.restore(job)
    print("to keep it, set the kernel's mode to wheel: the next deploy does what the data says")
    return 0


def receipt(arguments: argparse.Namespace) -> int:
    """Print the receipt of what is installed."""
    job = read_job(arguments.release)
    known = install.record(job)
    if known.get("mode") == "wheel":
        print(json.dumps(known, indent=2))
        return 0
    stored = store.find(job, str(known.get("digest"))) if known else None
    if stored is None:
        raise RigctlError(f"{job.engine.path}: no {job.package} of ours is installed; `rigctl kernel status` says more")
    print(json.dumps(stored.receipt, indent=2))
    return 0


def prove_path(arguments: argparse.Namespace) -> int:
    """Print what each library holds; exit code 1 when `--only` is given and something else is in it."""
    path: Path = arguments.path.absolute()
    arguments.cuobjdump = arguments.cuobjdump.absolute()
    for there in (path, arguments.cuobjdump):
        if not there.exists():
            raise RigctlError(f"{there}: no such file or directory to prove or to prove with")
    if builder.needed():
        only = [f"--only={each}" for each in arguments.only]
        again = own_process("rigctl", "kernel", "prove", str(path), f"--cuobjdump={arguments.cuobjdump}", *only)
        return builder.spoken(again, unit=f"prove-{os.getpid()}", reads=[path, arguments.cuobjdump.parent])[0]
    if path.suffix == ".whl":
        held = cubins.of_wheel(path, arguments.cuobjdump)
    elif path.is_dir():
        held = cubins.of_tree(path, arguments.cuobjdump)
    else:
        held = {path.name: cubins.of_library(path, arguments.cuobjdump)}
    for library, counts in held.items():
        print(f"{library}: {', '.join(f'{count} x {name}' for name, count in counts.items()) or 'no device code'}")
    if arguments.only:
        wanted = [cubins.architecture(each) for each in arguments.only]
        if reasons := list(cubins.objections(held, wanted, [], only=True)):
            raise RigctlError(f"{path}: {'; '.join(reasons)}")
    return 0
