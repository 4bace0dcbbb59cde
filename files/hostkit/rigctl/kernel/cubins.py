"""Which GPUs a library's code is for: read from the library, by cuobjdump.

Architectures are named as nvcc does ("sm_120a").
"""

import re
import subprocess
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rigctl import builder
from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi

ELF = re.compile(r"^ELF file\s+\d+:.*?\.(sm_\d+[a-z]?)\.cubin$", re.MULTILINE)

Cubins = dict[str, dict[str, int]]
"""Library -> architecture -> number of ELF images."""


def architecture(capability: str) -> str:
    """nvcc's name for a compute capability, without "sm_": "12.0" -> "120a", "8.9" -> "89".

    From 9.0 on there are instructions of that capability only, in the variant with an "a" (CUDA C++ Programming Guide,
    architecture-specific features).
    """
    found = re.fullmatch(r"(\d+)\.(\d)", capability)
    if not found:
        raise RigctlError(f"{capability!r} is no compute capability, such as 12.0")
    return f"{found[1]}{found[2]}{'a' if int(found[1]) >= 9 else ''}"


def host_capabilities() -> list[str]:
    """Compute capabilities of this host's GPUs, each once. Raises RigctlError where no GPU answers."""
    found = sorted({row[0] for row in nvidia_smi("--query-gpu=compute_cap") if re.fullmatch(r"\d+\.\d", row[0])})
    if not found:
        raise RigctlError(
            "no GPU of this host tells its compute capability (nvidia-smi): load the driver, or name `architectures` "
            'in the release\'s kernel, such as ["12.0"]'
        )
    return found


def wanted(capabilities: Sequence[str]) -> list[str]:
    """nvcc's names for the capabilities given, or for those of this host's GPUs when none is."""
    return sorted({architecture(each) for each in capabilities or host_capabilities()})


def of_library(library: Path, cuobjdump: Path) -> dict[str, int]:
    """Architecture -> ELF images in one library; empty for one without device code."""
    builder.inside()
    done = subprocess.run([cuobjdump, "--list-elf", library], capture_output=True, errors="replace", check=False)
    if done.returncode != 0 and "does not contain device code" not in done.stdout + done.stderr:
        raise RigctlError(f"cuobjdump cannot read {library}: {(done.stderr or done.stdout).strip()}")
    return dict(sorted(Counter(ELF.findall(done.stdout)).items()))


def of_tree(root: Path, cuobjdump: Path, paths: Sequence[str] | None = None) -> Cubins:
    """The libraries below `root`, or those among `paths`."""
    names = paths if paths is not None else [str(path.relative_to(root)) for path in sorted(root.rglob("*.so*"))]
    return {name: of_library(root / name, cuobjdump) for name in names if ".so" in Path(name).name}


def of_wheel(wheel: Path, cuobjdump: Path) -> Cubins:
    """The libraries in a wheel."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return of_tree(Path(folder), cuobjdump)


def objections(cubins: Cubins, architectures: Sequence[str], required: Sequence[str], *, only: bool) -> Iterator[str]:
    """Why libraries do not prove to be for `architectures`, one sentence each; none when they do. Pure.

    required: patterns; some library must match each, and those that do must hold every architecture. only: no library
    may hold code for another one.
    """
    names = {f"sm_{each}" for each in architectures}
    if not any(cubins.values()):
        yield f"none of its {len(cubins)} libraries holds device code"
        return
    for pattern in required:
        matching = [library for library in cubins if fnmatchcase(library, pattern)]
        if not matching:
            yield f"no library is {pattern} (there are: {', '.join(cubins)})"
        for library in matching:
            if missing := sorted(names - cubins[library].keys()):
                yield f"{library} holds {_held(cubins[library])}, nothing for {', '.join(missing)}"
    for library, held in cubins.items():
        if only and (foreign := sorted(held.keys() - names)):
            yield f"{library} holds {_held(held)}; {', '.join(foreign)} is not wanted"


def _held(held: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in held.items()) or "no device code"
