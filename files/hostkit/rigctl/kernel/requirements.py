"""What a build needs of this host, and what of it is missing: all of it in one message, before anything is built."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rigctl.contract.kernel_job import GitSource, KernelJob, SourceDirectory
from rigctl.errors import RigctlError

DECLARED = re.compile(r"^\s*FetchContent_Declare\s*\(\s*([\w.-]+)", re.IGNORECASE | re.MULTILINE)
# Dependencies whose own CMake files take part in the build, and may declare further ones.
ENTERED = re.compile(
    r"^\s*FetchContent_MakeAvailable\s*\(([^)]*)\)|^\s*add_subdirectory\s*\(\s*\"?\$\{([\w.-]+)_SOURCE_DIR\}",
    re.IGNORECASE | re.MULTILINE,
)
PROGRAMS = {"g++": "g++", "nm": "binutils", "git": "git"}
"""Programs of every build from source, and the packages they are in."""
TRUE = {"1", "ON", "YES", "TRUE", "Y"}


def trees(job: KernelJob) -> dict[str, Path]:
    """Directories of the dependencies and of what is nested in them, by "name" and "name/place"."""
    found = {}
    for name, dependency in job.dependencies.items():
        found[name] = dependency.path
        found |= {f"{name}/{place}": path for place, path in dependency.nested.items()}
    return found


def refuse(job: KernelJob, missing: Iterable[str]) -> None:
    """Raises RigctlError that names everything that is missing."""
    if named := list(missing):
        raise RigctlError(f"{job.package} cannot be built here: {'; '.join(named)}")


def missing(job: KernelJob) -> Iterator[str]:
    """What a build lacks, a phrase each, with its cure. Changes nothing."""
    yield from absent_trees(job)
    there = installed(job.system_packages)
    if absent := [package for package in job.system_packages if package not in there]:
        yield f"packages {', '.join(absent)} are not installed: deploy, or apt-get install {' '.join(absent)}"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            yield f"{program} is not installed: apt-get install {package}"
    home = job.toolchain.cuda_home
    if home is not None and not (home / "bin" / "nvcc").exists():
        yield f"{home}/bin/nvcc: not there; install the CUDA toolkit, or correct the kernel's toolchain.cuda_home"
    if isinstance(job.source, SourceDirectory) and job.source.path.is_dir():
        yield from undeclared(job, job.source.path)


def absent_trees(job: KernelJob) -> Iterator[str]:
    """Directories that the job names and this host lacks."""
    for name, path in trees(job).items():
        if not path.is_dir():
            yield f"{path}: not there; it is dependency {name} of {job.package}: put its source there"
    if isinstance(job.source, GitSource):
        if (job.source.mirror or "").startswith("/") and not Path(str(job.source.mirror)).exists():
            yield f"{job.source.mirror}: not there; it is the mirror of the source"
    elif job.source and not (job.source.path / job.subdirectory / "pyproject.toml").is_file():
        yield (
            f"{job.source.path / job.subdirectory}: no pyproject.toml there: put the source of {job.package} at "
            f"{job.source.path}, or correct the kernel's source and subdirectory"
        )


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Those packages of the distribution that are installed, with their versions."""
    if not packages:
        return {}
    form = "${binary:Package} ${db:Status-Status} ${Version}\n"
    query = ["dpkg-query", "-W", "-f", form, *packages]
    done = subprocess.run(query, capture_output=True, errors="replace", check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0].partition(":")[0]: row[2] for row in rows if row[1:2] == ["installed"]}


def undeclared(job: KernelJob, tree: Path) -> Iterator[str]:
    """Dependencies that the project's CMake files declare and the job does not give, where none may be fetched."""
    if job.defines.get("FETCHCONTENT_FULLY_DISCONNECTED", "").upper() not in TRUE:
        return
    for name, place in fetched(job, tree).items():
        yield (
            f"{name} is declared in {place} and not given: name its directory in dependencies, or {name} in "
            "unused_dependencies if nothing wanted needs it"
        )


def fetched(job: KernelJob, tree: Path) -> dict[str, str]:
    """Dependencies that CMake would fetch -> where they are declared: in the project, or a dependency that it enters.

    Read as text: one in a branch that is not taken counts too, unless it is in unused_dependencies.
    """
    given = {name.lower(): dependency.path for name, dependency in job.dependencies.items()}
    found: dict[str, str] = {}
    pending, seen = [(tree / job.subdirectory, tree)], set()
    while pending:
        folder, root = pending.pop()
        seen.add(folder)
        for path in filter(Path.is_file, sorted([*folder.rglob("CMakeLists.txt"), *folder.rglob("*.cmake")])):
            text = re.sub(r"^\s*#.*", "", path.read_text(errors="replace"), flags=re.MULTILINE)
            for each in DECLARED.finditer(text):
                found.setdefault(each[1], f"{root.name}/{path.relative_to(root)}")
            entered = [word.lower() for each in ENTERED.finditer(text) for word in (each[1] or each[2]).split()]
            below = [given[name] for name in entered if name in given]
            pending += [(path, path) for path in below if path not in seen]
    known = {name.lower() for name in (*given, *job.unused_dependencies)}
    return {name: place for name, place in found.items() if name.lower() not in known}
