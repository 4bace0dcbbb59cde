"""The subcommands of `rigctl kernel`."""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rigctl.engines.installed import distributions, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import build, cubins, install, memory, store, toolchain
from rigctl.kernel import spec as specs
from rigctl.kernel.spec import Spec


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kernel` to the command line."""
    parser = subparsers.add_parser("kernel", help="build, prove and install an engine's CUDA kernel wheel")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("ensure", ensure, "build what is missing and install it"),
        ("status", status, "what is installed, and whether it is what it should be (exit code 1: it is not)"),
        ("stock", stock, "go back to the wheel of the release's lock"),
        ("receipt", receipt, "from what the installed wheel was built"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("release", help="name of a release with a kernel, or path of a specification")
        action.add_argument("--json", action="store_true")
        action.set_defaults(run=run)
    prove = actions.add_parser("prove", help="which GPUs the code in a wheel or environment is for")
    prove.add_argument("path", type=Path, help="a wheel, a library, or a directory of libraries")
    prove.add_argument("--cuobjdump", type=Path, required=True)
    prove.add_argument(
        "--only", action="append", default=[], metavar="CAPABILITY", help="such as 12.0; no other may be in it"
    )
    prove.set_defaults(run=prove_path)


# What is there


def examine(spec: Spec) -> dict[str, Any]:
    """State of a kernel: "installed", "wheel" (the stock one, proved), or what is to be done, in "state" and "why"."""
    site = site_packages(spec.environment)
    there = {each.name: each.version for each in distributions(site)}.get(normalised(spec.package))
    known = install.record(spec)
    answer: dict[str, Any] = {"package": spec.package, "version": there, "mode": spec.mode}
    if not toolchain.ready(spec):
        return answer | {"state": "missing", "why": "there is no toolchain yet"}
    if spec.mode == "wheel":
        return answer | _examine_stock(spec, known)
    chain = toolchain.examine(spec)
    digest = build.gather(spec, chain).digest
    answer["digest"] = digest
    stored = store.find(spec, digest)
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
        return answer | {"state": "replaced", "why": f"something put another {spec.package} over ours: {wrong}"}
    return answer | {"state": "built", "why": "built, not installed"}


def _examine_stock(spec: Spec, known: dict[str, Any]) -> dict[str, Any]:
    if known.get("mode") != "wheel":
        return {
            "state": "missing",
            "why": "the lock's wheel is not proved" if not known else "another wheel is installed",
        }
    if known["architectures"] != cubins.wanted(spec.architectures) or known["record"] != _stock_record(spec):
        return {"state": "missing", "why": "the proof is of another wheel or GPU"}
    return {"state": "wheel", "why": ""}


def _stock_record(spec: Spec) -> str:
    """Digest of the installed package's RECORD; "" where it is not installed."""
    for each in distributions(site_packages(spec.environment)):
        if each.name == normalised(spec.package):
            return store.sha256(each.dist_info / "RECORD")
    return ""


def status(arguments: argparse.Namespace) -> int:
    """Exit code 0 when the kernel is what it should be, else 1."""
    spec = specs.read(arguments.release)
    try:
        found = examine(spec)
    except RigctlError as error:
        found = {"package": spec.package, "mode": spec.mode, "state": "wrong", "why": str(error)}
    if arguments.json:
        print(json.dumps(found))
    else:
        why = f": {found['why']}" if found["why"] else ""
        print(f"{found['package']} {found.get('version') or ''}: {found['state']}{why}")
    return 0 if found["state"] in ("installed", "wheel") else 1


# What is done


@contextmanager
def _alone(spec: Spec) -> Iterator[None]:
    """One build of a kernel at a time on a host."""
    spec.root.mkdir(parents=True, exist_ok=True)
    with (spec.root / f".{spec.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another build of {spec.name} is at work: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure(arguments: argparse.Namespace) -> int:
    """Do what `examine` finds missing; nothing when nothing is."""
    spec = specs.read(arguments.release)
    with _alone(spec):
        toolchain.provide(spec)
        if spec.mode == "wheel":
            return _ensure_stock(spec)
        chain = toolchain.examine(spec)
        inputs = build.gather(spec, chain)
        stored = store.find(spec, inputs.digest) or _fetched(spec, chain, inputs) or _built(spec, chain, inputs)
        if (
            install.differs(stored.wheel, site_packages(spec.environment))
            or install.record(spec).get("digest") != inputs.digest
        ):
            install.install(spec, stored.wheel, inputs.digest)
        print(f"{spec.package} is what it should be ({inputs.digest})")
    return 0


def _fetched(spec: Spec, chain: toolchain.Toolchain, inputs: build.Inputs) -> store.Stored | None:
    found = store.fetch(spec, inputs.digest)
    if found is None:
        return None
    # What another host calls proved is proved again.
    build.Build(spec, chain, inputs).prove(found.wheel)
    print(f"{found.wheel.name} was built by {found.receipt.get('host')}, fetched from {spec.shared}", flush=True)
    return store.put(spec, inputs.digest, found.wheel, {**found.receipt, "fetched_from": spec.shared})


def _built(spec: Spec, chain: toolchain.Toolchain, inputs: build.Inputs) -> store.Stored:
    serving = serving_units()
    if serving and spec.while_serving == "refuse":
        raise RigctlError(
            f"{', '.join(serving)} serves: a build would slow it down; stop it, or set while_serving: share in the "
            "release's kernel"
        )
    jobs = build.jobs_for(spec, build.cores(), memory.available(), serving=bool(serving))
    stored = build.Build(spec, chain, inputs).run(jobs)
    receipt = stored.receipt
    print(
        f"{stored.wheel.name}: built in {receipt['seconds']:.0f} s, {receipt['compiled']} files compiled, "
        f"{stored.wheel.stat().st_size / 1e6:.1f} MB, peak {receipt['peak_mib']} MiB",
        flush=True,
    )
    store.publish(spec, stored)
    return stored


def serving_units() -> list[str]:
    """Units of ours that serve now; none where systemd is not."""
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating", "kimi-*.service"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    units = [line.split()[0] for line in done.stdout.splitlines() if line.split()]
    return [
        unit for unit in units if not unit.startswith(("kimi-job-", "kimi-acs", "kimi-power-limit", "kimi-restart-"))
    ]


def _ensure_stock(spec: Spec) -> int:
    known = install.record(spec)
    if known.get("mode") == "source":
        install.restore(spec)
    wanted = cubins.wanted(spec.architectures)
    site = site_packages(spec.environment)
    found = [each for each in distributions(site) if each.name == normalised(spec.package)]
    if not found:
        raise RigctlError(
            f"{spec.environment}: no {spec.package} in it, and the kernel's mode is wheel: correct the package"
        )
    paths = [entry.path for entry in found[0].record()]
    held = cubins.of_tree(site, toolchain.cuda_root(spec) / "bin" / "cuobjdump", paths)
    if reasons := list(cubins.objections(held, wanted, spec.libraries, only=False)):
        raise RigctlError(
            f"the stock {spec.package} {found[0].version} is not for this host's GPU ({', '.join(wanted)}): "
            f"{'; '.join(reasons)}; set the kernel's mode to source"
        )
    install.write_record(
        spec,
        mode="wheel",
        package=found[0].name,
        version=found[0].version,
        architectures=wanted,
        record=_stock_record(spec),
        cubins=held,
    )
    print(f"{spec.package} {found[0].version} of the lock holds code for {', '.join(wanted)}")
    return 0


def stock(arguments: argparse.Namespace) -> int:
    """Back to the lock's wheel, in one step. The next deploy does what the release's data says."""
    spec = specs.read(arguments.release)
    with _alone(spec):
        install.restore(spec)
    print("to keep it, set the kernel's mode to wheel: the next deploy does what the data says")
    return 0


def receipt(arguments: argparse.Namespace) -> int:
    """Print the receipt of what is installed."""
    spec = specs.read(arguments.release)
    known = install.record(spec)
    if known.get("mode") == "wheel":
        print(json.dumps(known, indent=2))
        return 0
    stored = store.find(spec, str(known.get("digest"))) if known else None
    if stored is None:
        raise RigctlError(
            f"{spec.environment}: no {spec.package} of ours is installed; `rigctl kernel status` says more"
        )
    print(json.dumps(stored.receipt, indent=2))
    return 0


def prove_path(arguments: argparse.Namespace) -> int:
    """Print what each library holds; exit code 1 when `--only` is given and something else is in it."""
    path: Path = arguments.path
    for there in (path, arguments.cuobjdump):
        if not there.exists():
            raise RigctlError(f"{there}: no such file or directory to prove or to prove with")
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
