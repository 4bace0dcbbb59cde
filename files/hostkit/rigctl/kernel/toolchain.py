"""The toolchain of a build: a locked environment of tools, a CUDA toolkit put together from links, gcc within range."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rigctl import builder
from rigctl.contract.environment_build import EnvironmentBuild
from rigctl.contract.kernel_job import KernelJob
from rigctl.engines import environment
from rigctl.engines.installed import distributions, site_packages
from rigctl.errors import RigctlError

STUB_SOURCE = "int cuInit(unsigned int flags) { return 100; }\n"  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Toolchain:
    """What is there to build with. versions: what goes into the digest of a build."""

    tools: Path
    """Environment with cmake, ninja, scikit-build-core and cuobjdump."""
    cuda: Path
    """Toolkit root: bin, include, lib64, nvvm."""
    engine_site: Path
    """site-packages of the engine: the release's torch."""
    versions: Mapping[str, str]

    @property
    def cuobjdump(self) -> Path:
        return self.cuda / "bin" / "cuobjdump"


def ready(job: KernelJob) -> bool:
    """Whether everything is there; made otherwise by `provide`."""
    return (job.toolchain.path / environment.STAMP).exists() and (cuda_root(job) / "complete").exists()


def cuda_root(job: KernelJob) -> Path:
    """The toolkit for one engine environment: its torch's CUDA libraries beside the toolchain's compiler."""
    release, digest = job.engine.path.parent.name, job.engine.path.name
    return job.toolchain.path / f"cuda-{release}-{digest}"


def provide(job: KernelJob) -> None:
    """Make what is missing. Raises RigctlError."""
    chain = job.toolchain
    python, cache = job.engine.python, job.root.parent / ".cache"
    environment.build(EnvironmentBuild(path=chain.path, python=python, lock=chain.lock, cache=cache, wheels=job.wheels))
    for each in chain.path.glob("cuda-*"):
        release, _, digest = each.name.removeprefix("cuda-").rpartition("-")
        if not (job.engine.path.parent.parent / release / digest).exists():
            shutil.rmtree(each)  # of an environment that is gone
    root = cuda_root(job)
    if not (root / "complete").exists():
        _merge(root, list(_origins(job)))


def _origins(job: KernelJob) -> Iterator[Path]:
    """Directories with a toolkit's layout, the first wins."""
    tools, engine = (site_packages(path) for path in (job.toolchain.path, job.engine.path))
    home = job.toolchain.cuda_home
    if home is not None:
        if not (home / "bin" / "nvcc").exists():
            raise RigctlError(f"{home}/bin/nvcc: not there; install the CUDA toolkit")
        yield home
    # Wheels of CUDA 13 share one directory, those of CUDA 12 have one each.
    for site in (tools, engine):
        yield from sorted(each for each in (site / "nvidia").glob("*") if (each / "include").is_dir())
        yield from sorted(each for each in (site / "nvidia").glob("*") if not (each / "include").is_dir())


def _merge(root: Path, origins: list[Path]) -> None:
    scratch = root.with_name(f".{root.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    for origin in origins:
        for part in ("bin", "include", "lib", "lib64", "nvvm"):
            # In NVIDIA's packages include and lib64 are links into targets/.
            if (origin / part).is_dir():
                _link_tree((origin / part).resolve(), scratch / part.replace("lib64", "lib"))
    if not (scratch / "bin" / "nvcc").exists():
        raise RigctlError(
            f"no nvcc in {', '.join(map(str, origins)) or 'any package'}: name a lock with one, or cuda_home"
        )
    (scratch / "lib64").symlink_to("lib")
    for library in sorted((scratch / "lib").glob("*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    _stub(scratch / "lib" / "stubs")
    (scratch / "complete").touch()
    shutil.rmtree(root, ignore_errors=True)
    scratch.rename(root)


def _link_tree(origin: Path, target: Path) -> None:
    """A directory of links to files; those that are there stay."""
    for folder, _, names in os.walk(origin, followlinks=True):
        into = target / Path(folder).relative_to(origin)
        into.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not os.path.lexists(into / name):
                (into / name).symlink_to(Path(folder) / name)


def _stub(folder: Path) -> None:
    """libcuda to link against: the real one comes with the driver, which a build machine need not have."""
    folder.mkdir(exist_ok=True)
    stub = folder / "libcuda.so"
    if not stub.exists():
        compile_library(STUB_SOURCE, stub, "libcuda.so.1")
    if not (folder / "libcuda.so.1").exists():
        (folder / "libcuda.so.1").symlink_to("libcuda.so")


def compile_library(source: str, path: Path, soname: str) -> None:
    """Compile C into a shared library. Raises RigctlError."""
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(path), "-x", "c", "-"]
    try:
        done = subprocess.run(command, input=source, errors="replace", capture_output=True, check=False)
    except FileNotFoundError:
        raise RigctlError("gcc is not installed on this host: install g++ and deploy again") from None
    if done.returncode != 0:
        raise RigctlError(f"gcc could not make {path.name}: {done.stderr.strip()}")


def examine(job: KernelJob) -> Toolchain:
    """The toolchain with its versions, checked against each other. Raises RigctlError with what does not fit.

    Asks the compilers: as the builder.
    """
    cuda, site = cuda_root(job), site_packages(job.engine.path)
    torch = next((each.version for each in distributions(site) if each.name == "torch"), None)
    if torch is None:
        raise RigctlError(f"{job.engine.path}: no torch in it; {job.package} is built against the engine's")
    nvcc, gcc = nvcc_version(cuda), gcc_version()
    if reason := unfit(nvcc, gcc, gcc_limit(cuda), torch_cuda(site), job.minimum_cuda):
        raise RigctlError(f"{job.package} cannot be built here: {reason}")
    versions = {"torch": torch, "nvcc": nvcc, "gcc": gcc, "python": job.engine.python, "tools": job.toolchain.path.name}
    return Toolchain(job.toolchain.path, cuda, site, versions)


def unfit(nvcc: str, gcc: str, gcc_newest: int | None, torch_cuda: str | None, minimum: str) -> str | None:
    """Why these do not go together; None when they do. Pure. Versions as the programs report them."""
    if _numbers(nvcc) < _numbers(minimum):
        return f"nvcc {nvcc} is older than {minimum}, too old for this GPU; name a newer toolchain"
    if gcc_newest is not None and _numbers(gcc)[0] > gcc_newest:
        return (
            f"gcc {gcc} is newer than {gcc_newest}, the newest that nvcc {nvcc} takes; install g++-{gcc_newest} and "
            "make it the default, or name a newer toolchain"
        )
    if torch_cuda and _numbers(torch_cuda)[0] != _numbers(nvcc)[0]:
        return (
            f"torch is made for CUDA {torch_cuda}, the toolkit is {nvcc}: they must agree in the first number; name "
            "the other toolchain"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def nvcc_version(cuda: Path) -> str:
    """Such as "13.0.88"."""
    builder.inside()
    try:
        done = subprocess.run([cuda / "bin" / "nvcc", "--version"], capture_output=True, errors="replace", check=False)
    except OSError as error:
        raise RigctlError(f"{cuda}/bin/nvcc: {error.strerror}") from None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    if not found:
        raise RigctlError(f"{cuda}/bin/nvcc tells no version: {(done.stdout + done.stderr).strip()}")
    return found[1]


def gcc_version() -> str:
    """Such as "12.2.0"."""
    try:
        done = subprocess.run(
            ["g++", "-dumpfullversion", "-dumpversion"], capture_output=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise RigctlError("g++ is not installed on this host: install it and deploy again") from None
    return done.stdout.strip()


def gcc_limit(cuda: Path) -> int | None:
    """The newest gcc that this nvcc takes, as its own header says."""
    header = cuda / "include" / "crt" / "host_config.h"
    found = re.search(r"#if __GNUC__ > (\d+)", header.read_text(errors="replace")) if header.exists() else None
    return int(found[1]) if found else None


def torch_cuda(site: Path) -> str | None:
    """The CUDA version that torch was made for ("12.8"); None for a build without."""
    version = site / "torch" / "version.py"
    found = (
        re.search(r"^cuda[^=\n]*=\s*['\"]([\d.]+)['\"]", version.read_text(), re.MULTILINE)
        if version.exists()
        else None
    )
    return found[1] if found else None


def build_environment(chain: Toolchain, job: KernelJob, jobs: int, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a build: the toolchain's programs first, then the host's."""
    path = [chain.tools / "bin", chain.cuda / "bin", *map(Path, ("/usr/local/bin", "/usr/bin", "/bin"))]
    kept = {
        name: value for name, value in os.environ.items() if name.lower().endswith(("_proxy", "_cert", "ssl_cert_file"))
    }
    return {
        **kept,
        "HOME": os.environ.get("HOME", str(chain.tools)),
        "LANG": "C.UTF-8",
        "PATH": ":".join(map(str, path)),
        # The engine's own packages: its torch, without a second copy.
        "PYTHONPATH": f"{site_packages(chain.tools)}:{chain.engine_site}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_HOME": str(chain.cuda),
        "CUDACXX": str(chain.cuda / "bin" / "nvcc"),
        # The compiler driver asks for the real place of a toolkit, which may lack what was put beside it.
        "LIBRARY_PATH": f"{chain.cuda}/lib64:{chain.cuda}/lib64/stubs",
        "CUDAToolkit_ROOT": str(chain.cuda),
        "CMAKE_GENERATOR": "Ninja",
        # scikit-build-core names the tools' packages only: torch and the other libraries are the engine's.
        "CMAKE_PREFIX_PATH": ":".join(filter(None, (job.environment.get("CMAKE_PREFIX_PATH"), str(chain.engine_site)))),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        "MAX_JOBS": str(jobs),
        "NINJA_STATUS": "[%f/%t] ",
        **more,
        **{name: value for name, value in job.environment.items() if name != "CMAKE_PREFIX_PATH"},
    }
