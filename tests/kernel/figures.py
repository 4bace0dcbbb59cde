"""Figures of kernel builds: python3 tests/kernel/figures.py SPECIFICATION [--jobs N] [--limit MIB]

SPECIFICATION: as `rigctl kernel` takes it, of the stand-in; its toolchain is there. Needs the machine alone. Prints one
JSON object a figure: processor and wall seconds of all it starts, installed bytes, and the greatest resident memory of
all processes together (MiB). --limit: memory control group for the comparison of the launcher; needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "files/hostkit"))

from rigctl.cli import RigctlError  # the path comes first
from rigctl.kernel import build, commands, memory, source, toolchain
from rigctl.kernel import spec as specs


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
    }


class Figures:
    def __init__(self, spec: specs.Spec, jobs: int) -> None:
        self.spec, self.jobs, self.number = spec, jobs, 0

    def fresh(self, **changes: Any) -> specs.Spec:
        """The specification with a root of its own: nothing built, nothing known."""
        self.number += 1
        root = self.spec.root.parent / f"figures-{os.getpid()}-{self.number}"
        return dataclasses.replace(self.spec, root=root, **changes)

    def ours(self, spec: specs.Spec, **variables: str) -> Path:
        """As the stage builds."""
        spec = dataclasses.replace(spec, variables={**spec.variables, **variables})
        chain = toolchain.examine(spec)
        return build.Build(spec, chain, build.gather(spec, chain)).run(self.jobs).wheel

    def plainly(self, spec: specs.Spec, defines: Mapping[str, str] | None = None) -> Path:
        """As a person does: the project's own build, the same toolchain and job count, no launcher, no forcing."""
        chain = toolchain.examine(spec)
        work = spec.root / "plain"
        source.copy((spec.source.path if spec.source else None) or Path(), work / "source")
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
    parser.add_argument("--only", default="size,ccache,nothing,memory")
    arguments = parser.parse_args()
    spec = specs.read(str(arguments.specification.resolve()))
    toolchain.provide(spec)
    figures, only = Figures(spec, arguments.jobs), arguments.only.split(",")
    if "size" in only:
        say("one architecture", **measured(lambda: figures.ours(figures.fresh(), CCACHE_DISABLE="1")))
        say("the project's own list", **measured(lambda: figures.plainly(figures.fresh())))
    if "ccache" in only and shutil.which("ccache"):
        warm = figures.fresh()
        say("empty ccache", **measured(lambda: figures.ours(warm)))
        shutil.rmtree(warm.root / "store")
        say("warm ccache", **measured(lambda: figures.ours(warm)))
    if "nothing" in only:
        times = []
        for _ in range(5):
            begun = time.monotonic()
            state = commands.examine(spec)["state"]
            times.append(time.monotonic() - begun)
        say("no change", state=state, median_seconds=round(statistics.median(times), 3))
    if "memory" in only and arguments.limit:
        in_group(arguments.limit)
        both = {"drop_targets": ("flash_ops",), "memory": {"heavy.cu": 1550, "default": 600}}
        for name, run in (
            ("with the launcher", lambda: figures.ours(figures.fresh(**both), CCACHE_DISABLE="1")),
            ("without it", lambda: figures.plainly(figures.fresh())),
        ):
            try:
                say(name, limit_mib=arguments.limit, jobs=arguments.jobs, ended="whole", **measured(run))
            except RigctlError as error:
                say(name, limit_mib=arguments.limit, jobs=arguments.jobs, ended=str(error)[:300])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
