"""The stand-in kernel package, built by `rigctl kernel` for this machine's card, installed, and run against torch.

python3 tests/gpu/kernel.py OUT WHEELS [--work DIRECTORY]

OUT: a folder for the receipt and a report. WHEELS: a directory with the wheels of files/locks/kernel-tools-*.txt and of
uv, pydantic and psutil; no index is asked. The toolkit is the machine's own (nvcc by PATH), torch that of this Python,
which is not changed. Needs root or not, Python 3.11 or 3.12 in /usr/bin, g++. Exit code 0: every step did as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTKIT = ROOT / "files/hostkit"
TREES = ROOT / "tests/kernel"
TORCH = {"torch", "triton", "numpy", "filelock", "typing-extensions", "jinja2", "markupsafe", "networkx", "sympy"}
TORCH |= {"mpmath", "fsspec", "setuptools", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit"}
DROPPED = {"9.0": "common_ops_sm100_build"}
"""Target that is of no use on a card, by capability; the loader takes sm90/ for 9.0 and sm100/ else."""

# `rigctl kernel` alone: other subcommands need packages that are not here.
COMMAND = """
import argparse, sys
from rigctl import builder, kernel
from rigctl.errors import RigctlError
builder.unconfined()  # a machine that is thrown away
parser = argparse.ArgumentParser()
kernel.register(parser.add_subparsers())
arguments = parser.parse_args()
try:
    sys.exit(arguments.run(arguments))
except RigctlError as error:
    sys.exit(f"rigctl kernel: {error}")
"""

CHECK = """
import json, sys, time, torch, rig_kernel
torch.manual_seed(0)
one = torch.randn(4097, 513, device="cuda")
results = {
    "scale": (rig_kernel.scale(one, 1.5), one * 1.5 + 3),
    "relu": (rig_kernel.relu(one), torch.relu(one)),
    "heavy": (rig_kernel.heavy(one), one + 7),
    "huge": (rig_kernel.huge(one), one + 9),
    "shift": (rig_kernel.shift(one), one),
    "row_sum": (rig_kernel.row_sum(one), one.sum(1)),
}
report = {"card": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
          "torch": torch.__version__, "library": str(rig_kernel.library), "largest_difference": {}}
for name, (ours, theirs) in results.items():
    report["largest_difference"][name] = (ours - theirs).abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
print(json.dumps(report))
"""


def interpreter_version() -> str:
    """As the locks name it: "3.12"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def run(command: list[str], **environment: str) -> str:
    """Standard output of a command that must succeed; what it says on standard error is shown."""
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:6])}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def hostkit(work: Path, wheels: Path, version: str) -> Path:
    """An environment for rigctl: uv, and the packages that orders and children of a build need."""
    python = f"/usr/bin/python{version}"
    run([python, "-m", "venv", "--clear", "--without-pip", str(work / "hostkit")])
    [uv] = wheels.glob("uv-*.whl")
    site = next((work / "hostkit" / "lib").glob("python3.*/site-packages"))
    run([python, "-m", "zipfile", "-e", str(uv), str(site)])
    binary = next(site.glob("uv-*.data/scripts/uv"))
    shutil.copy2(binary, work / "hostkit" / "bin" / "uv")
    (work / "hostkit" / "bin" / "uv").chmod(0o755)
    made = work / "hostkit" / "bin" / "python"
    options = ["--quiet", "--offline", "--no-index", f"--find-links={wheels}", f"--python={made}"]
    run([str(work / "hostkit" / "bin" / "uv"), "pip", "install", *options, "pydantic", "psutil"])
    return made


def engine(work: Path, version: str, uv: Path) -> tuple[Path, Path]:
    """An environment with this Python's own torch, file by file by hard link or copy, and its lock."""
    environment = work / "env" / "torch" / "0123456789ab"
    run([str(uv), "venv", "-q", "--clear", "--python", f"/usr/bin/python{version}", str(environment)], UV_OFFLINE="1")
    site = next((environment / "lib").glob("python3.*/site-packages"))
    pins = []
    for each in metadata.distributions():
        name = each.metadata["Name"].lower().replace("_", "-")
        if name not in TORCH and not name.startswith("nvidia-"):
            continue
        pins.append(f"{name}=={each.version}")
        for file in each.files or []:
            origin, target = Path(str(each.locate_file(file))), site / str(file)
            if "__pycache__" in str(file) or not origin.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(origin.resolve(), target)
            except FileExistsError:
                continue
            except OSError:
                shutil.copy2(origin, target)
    lock = work / "torch.txt"
    lock.write_text("\n".join(sorted(pins)) + "\n")
    return environment, lock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--prepare", action="store_true", help="environments and order only")
    parser.add_argument("--work", type=Path, default=Path("/tmp/kimi-rig-kernel"))
    arguments = parser.parse_args()
    out, wheels, work = (path.resolve() for path in (arguments.out, arguments.wheels, arguments.work))
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    version = interpreter_version()
    begun = time.monotonic()
    python = hostkit(work, wheels, version)
    environment, lock = engine(work, version, python.parent / "uv")
    print(f"environments after {time.monotonic() - begun:.0f} s", flush=True)
    shutil.copytree(TREES / "standin", work / "source", dirs_exist_ok=True)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on PATH")
    capability = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()[0]
    folder = "sm90" if capability == "9.0" else "sm100"
    order = {
        "format": 1,
        "mode": "source",
        "engine": {"path": str(environment), "python": version, "lock": str(lock)},
        "package": "rig-kernel",
        "module": "rig_kernel",
        "libraries": [f"rig_kernel/{folder}/common_ops*.so"],
        "toolchain": {
            "path": str(work / "env" / "toolchain"),
            "lock": str(ROOT / f"files/locks/kernel-tools-cp{version.replace('.', '')}.txt"),
            "cuda_home": str(Path(nvcc).resolve().parent.parent),
        },
        "wheels": str(wheels),
        "root": str(work / "env" / "kernels"),
        "source": {"kind": "directory", "path": str(work / "source")},
        "subdirectory": "kernels",
        "drop_targets": [DROPPED.get(capability, "common_ops_sm90_build"), "flash_ops"],
        "dependencies": {
            "repo-mathlib": {"path": str(TREES / "mathlib"), "private": True},
            "repo-shapes": {"path": str(TREES / "shapes"), "nested": {"ext/table": str(TREES / "table")}},
            "repo-inner": {"path": str(TREES / "inner")},
        },
        "unused_dependencies": ["repo-extra"],
        # Packages of the distribution cannot be installed there.
        "defines": {"FETCHCONTENT_FULLY_DISCONNECTED": "ON", "RIG_KERNEL_NUMA": "OFF"},
        "minimum_disk_mib": 1024,
    }
    file = work / "rig-kernel.json"
    file.write_text(json.dumps(order))
    if arguments.prepare:
        print(file)
        return 0
    rigctl = [str(python), "-c", COMMAND, "kernel"]
    path = {"PYTHONPATH": str(HOSTKIT), "PYTHONDONTWRITEBYTECODE": "1"}
    print(run([*rigctl, "ensure", str(file)], **path), flush=True)
    (out / "kernel-receipt.json").write_text(run([*rigctl, "receipt", str(file)], **path))
    again = time.monotonic()
    print(
        run([*rigctl, "ensure", str(file)], **path).strip(), f"again after {time.monotonic() - again:.1f} s", flush=True
    )
    report = run([str(environment / "bin" / "python"), "-c", CHECK])
    (out / "kernel-report.json").write_text(report)
    print(report, f"all after {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
