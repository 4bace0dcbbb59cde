"""Figures of kernel builds: python3 tests/kernel/figures.py SPECIFICATION [--runs N] [--jobs N] [--limit MIB]

SPECIFICATION: as `rigctl kernel` takes it, of the stand-in. Needs the machine alone. Prints one JSON object a run, then
the medians: processor and wall seconds of all it starts, installed bytes, and the greatest resident memory of all
processes together (MiB). What is compared is built in turn. --limit: memory control group in which the launcher is
compared with one that holds nothing back; needs root. The cost of no change is that of `rigctl kernel status` on a
host that has the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rigctl.contract.kernel_job import KernelJob, SourceDirectory
from rigctl.errors import RigctlError
from rigctl.kernel import memory, source, toolchain
from rigctl.kernel.commands import read_job
from tests.kernel.stored import stored


def measured(what: Callable[[], Path | None]) -> dict[str, Any]:
    """Run something that starts processes; what it took. Its wheel is measured as installed."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], memory.of_tree(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before, begun = os.times(), time.monotonic()
    try:
        wheel = what()
    finally:
        over.set()
        watcher.join()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    size = sum(each.file_size for each in zipfile.ZipFile(wheel).infolist()) if wheel else 0
    libraries = (
        [each.file_size for each in zipfile.ZipFile(wheel).infolist() if ".so" in each.filename] if wheel else []
    )
    return {
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "installed_bytes": size,
        "library_bytes": sum(libraries),
        "peak_mib": peak[0],
        "attempts": attempts(wheel),
    }


def attempts(wheel: Path | None) -> int:
    """How often it was built until memory sufficed; 1 for a wheel without our receipt."""
    receipt = wheel.parent / "receipt.json" if wheel else None
    return int(json.loads(receipt.read_text())["attempts"]) if receipt and receipt.exists() else 1


class Figures:
    def __init__(self, spec: KernelJob, jobs: int) -> None:
        self.spec, self.jobs, self.number = spec, jobs, 0

    def fresh(self, **changes: Any) -> KernelJob:
        """The specification with a root of its own: nothing built, nothing known."""
        self.number += 1
        root = self.spec.root.parent / f"figures-{os.getpid()}-{self.number}"
        return self.spec.model_copy(update={"root": root, **changes})

    def ours(self, spec: KernelJob, **variables: str) -> Path:
        """As the stage builds."""
        spec = spec.model_copy(update={"environment": {**spec.environment, **variables}})
        return stored(spec, self.jobs).wheel

    def plainly(self, spec: KernelJob, defines: Mapping[str, str] | None = None) -> Path:
        """As a person does: the project's own build, the same toolchain and job count, no launcher, no forcing."""
        chain = toolchain.examine(spec)
        work = spec.root / "plain"
        if not isinstance(spec.source, SourceDirectory):
            raise SystemExit("the source of the order is no directory")
        source.copy(spec.source.path, work / "source")
        settings = {**spec.defines, "RIG_KERNEL_CACHE": "OFF", "RIG_KERNEL_THREADS": "1", **(defines or {})}
        for name, dependency in spec.dependencies.items():
            source.copy(dependency.path, work / name)
            settings[f"FETCHCONTENT_SOURCE_DIR_{name.upper()}"] = str(work / name)
        command = [f"{chain.tools}/bin/python", "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
        command += [f"--outdir={work}/out", f"--config-setting=build-dir={work}/build"]
        command += [f"--config-setting=cmake.define.{name}={value}" for name, value in settings.items()]
        environment = toolchain.build_environment(chain, spec, self.jobs, {})
        done = subprocess.run(
            [*command, str(work / "source" / spec.subdirectory)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RigctlError(
                f"plain build: {'killed' if 'signal 9' in done.stdout + done.stderr else done.stdout[-800:]}"
            )
        return next((work / "out").glob("*.whl"))


def say(name: str, **what: Any) -> None:
    print(json.dumps({"figure": name, **what}), flush=True)


def compare(runs: int, works: Mapping[str, Callable[[], Path | None]], **common: Any) -> None:
    """Run each in turn, `runs` times; print every run and the medians."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            try:
                found[name].append(measured(work))
            except RigctlError as error:
                say(name, **common, failed=str(error)[:300])
            else:
                say(name, **common, **found[name][-1])
    for name, several in found.items():
        keys = several[0] if several else ()
        say(
            f"{name}, median",
            **common,
            runs=len(several),
            **{key: median(each[key] for each in several) for key in keys},
        )


def in_group(mebibytes: int) -> Path:
    """Put this process and what it starts into a memory control group (v1 or v2)."""
    top = Path("/sys/fs/cgroup")
    if (top / "memory").is_dir():
        group, limit = top / "memory" / f"kimi-figures-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, limit = top / f"kimi-figures-{os.getpid()}", "memory.max"
        (top / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    (group / limit).write_text(str(mebibytes << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specification", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="size,ccache,memory")
    arguments = parser.parse_args()
    spec = read_job(str(arguments.specification.resolve()))
    toolchain.provide(spec)
    figures, only, runs = Figures(spec, arguments.jobs), arguments.only.split(","), arguments.runs
    if "size" in only:
        compare(
            runs,
            {
                "one architecture": lambda: figures.ours(figures.fresh(), CCACHE_DISABLE="1"),
                "the project's own list": lambda: figures.plainly(figures.fresh()),
            },
        )
    if "ccache" in only and shutil.which("ccache"):
        warm: list[KernelJob] = []

        def empty() -> Path:
            warm[:] = [figures.fresh()]
            return figures.ours(warm[0])

        def again() -> Path:
            shutil.rmtree(warm[0].root / "store")
            return figures.ours(warm[0])

        compare(runs, {"empty ccache": empty, "warm ccache": again})
    if "memory" in only and arguments.limit:
        in_group(arguments.limit)
        known = {"heavy.cu": 1550, "default": 600}
        compare(
            runs,
            {
                "with the launcher": lambda: figures.ours(figures.fresh(memory_mib=known), CCACHE_DISABLE="1"),
                "held back by nothing": lambda: figures.ours(
                    figures.fresh(memory_mib=dict.fromkeys(known, 1)), CCACHE_DISABLE="1"
                ),
            },
            limit_mib=arguments.limit,
            jobs=arguments.jobs,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
