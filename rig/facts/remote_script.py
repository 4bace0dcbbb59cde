"""Read one host in one go: raw readings as one JSON document on standard output.

Runs on a bare host by `python3 -`, so: standard library only, nothing written, nothing changed. What it imports of ours
travels in front of it (rig/facts/report.py).
It reads and does not judge: tool outputs travel as text, and rig/facts/host.py parses them where the
parsers are typed, tested on recordings, and can be mended without touching a host. What cannot be read is
null with its reason under "unknown".

The one argument is a JSON object: {"paths": [data paths], "models": [checkpoint folders], "environments": folder,
"toolkits": [CUDA toolkit folders], "probes": [URLs], "hubs": {URL: [folders of checkpoints from there]},
"driver_source": URL, "timeout": seconds, "disk": [[kind, pattern of paths]], "only_disk": true where nothing else is
asked}.
"""

from __future__ import annotations

import concurrent.futures
import glob
import http.client
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rigctl.guarded import Place
from rigctl.reached import content

SCHEMA = 1
NVIDIA = "0x10de"
RECORDS = {"/run/kimi-rig": "started.json", "/var/lib/kimi-rig/serving": "ended.json"}
"""What units write down of their runs, in a directory of the service user's each."""
LONGEST = 16 << 20  # letters of a file: a checkpoint's config.json, or a table of the kernel's
SHM = "/dev/shm"  # noqa: S108
GPU_QUERY = (
    "index,name,pci.bus_id,compute_cap,memory.total,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,"
    "power.limit,power.min_limit,power.max_limit,mig.mode.current"
)
COMMANDS = {
    "gpus": ["nvidia-smi", "--query-gpu=" + GPU_QUERY, "--format=csv,nounits"],
    # Apart: nvidia-smi answers nothing at all where a driver does not know one field.
    "health": [
        "nvidia-smi",
        "--query-gpu=index,pci.bus_id,power.default_limit,ecc.errors.uncorrected.volatile.total",
        "--format=csv,nounits",
    ],
    "compute_apps": [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
        "--format=csv,nounits",
    ],
    "topology": ["nvidia-smi", "topo", "-m"],
    "p2p_read": ["nvidia-smi", "topo", "-p2p", "r"],
    "p2p_write": ["nvidia-smi", "topo", "-p2p", "w"],
    "modinfo": ["modinfo", "nvidia"],
    "virtualisation": ["systemd-detect-virt"],
    "container": ["systemd-detect-virt", "--container"],
    "xid": ["journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager", "-n", "50", "-g", "NVRM: Xid"],
    "time_sync": ["timedatectl", "show", "-p", "NTPSynchronized", "-p", "NTP"],
    "apt_config": ["apt-config", "dump"],
    "apt_holds": ["apt-mark", "showhold"],
}
DPKG = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\n"]
PACKAGES = ["nvidia-*", "cuda-drivers*", "needrestart"]
# Those that the preflight reports or the policy starts, and others that an override may name.
UNITS = [
    "nvidia-persistenced",
    "kimi-*.service",
    "nvidia-powerd",
    "nvidia-dcgm",
    "display-manager",
    "gdm",
    "lightdm",
    "sddm",
    "ollama",
    "vllm",
    "sglang",
    "irqbalance",
    "tuned",
    "chrony",
    "systemd-timesyncd",
]
FILES = [
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/sys/module/nvidia/version",
    "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    "/etc/os-release",
    "/sys/devices/system/node/online",
]
# Where the absence of a file is an answer.
OPTIONAL = ["/etc/ld.so.preload", "/etc/default/grub", "/etc/kernel/cmdline", "/var/lib/kimi-rig/kernel-arguments"]
GLOBS = ["/etc/default/grub.d/*.cfg", "/etc/modprobe.d/*.conf"]
EXISTS = [
    "/boot/grub/grub.cfg",
    "/boot/loader/entries",
    "/boot/efi/loader/entries",
    "/efi/loader/entries",
    "/.dockerenv",
    "/run/.containerenv",
    "/dev/nvidia-uvm",
]
# More than the policy sets: an override may set these, and is then compared.
SYSCTLS = [
    "vm.swappiness",
    "kernel.numa_balancing",
    "kernel.sched_migration_cost_ns",
    "vm.overcommit_memory",
    "vm.max_map_count",
    "kernel.pid_max",
    "fs.file-max",
    "net.core.somaxconn",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
]
MODINFO_KEEP = ("filename:", "version:", "license:", "signer:", "vermagic:")
APT_KEEP = ("APT::Periodic::", "Unattended-Upgrade::Package-Blacklist")
unknown: dict[str, str] = {}


def read(path: str, name: str | None = None) -> str | None:
    """Text of a file, or None with the reason noted under `name`."""
    try:
        # Some lie in directories that others can write: a pipe there is not waited for, and a long file not read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError(None, "it is no regular file")
            return stream.read(LONGEST).replace("\x00", "")
    except OSError as error:
        unknown[name or path] = error.strerror or str(error)
        return None


def foreign(path: str) -> str | None:
    """`read` for a file in a directory that others may write in; None, and no reason, where there is none."""
    try:
        return content(Path(path), LONGEST).decode(errors="replace").replace("\x00", "")
    except FileNotFoundError:
        return None
    except OSError as error:
        unknown[path] = error.strerror or str(error)
        return None


def files() -> dict[str, str | None]:
    """Texts of all files by path, None for the unreadable."""
    found = [path for pattern in GLOBS for path in sorted(glob.glob(pattern))]
    return {path: read(path) for path in FILES + [one for one in OPTIONAL if os.path.exists(one)] + found}


def run(command: list[str], limit: float) -> dict[str, Any]:
    """One command with a time limit: {"rc", "out", "err", "seconds"}; rc None: no answer, "err" says why."""
    begin = time.monotonic()
    environment = dict(os.environ, LC_ALL="C", PATH=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return {"rc": None, "out": "", "err": f"{command[0]}: {error.strerror}", "seconds": 0.0}
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # A process that sleeps uninterruptibly in the driver cannot be reaped: kill it and do not wait.
        os.killpg(child.pid, signal.SIGKILL)
        return {
            "rc": None,
            "out": "",
            "err": f"{command[0]}: no answer in {limit:g} s",
            "seconds": float(limit),
        }
    return {
        "rc": child.returncode,
        "out": out.decode(errors="replace"),
        "err": err.decode(errors="replace"),
        "seconds": round(time.monotonic() - begin, 3),
    }


def keep_lines(answer: dict[str, Any], beginnings: tuple[str, ...]) -> None:
    """Drops all lines of a long listing but those with one of the beginnings."""
    lines = [line for line in answer["out"].splitlines() if line.startswith(beginnings)]
    answer["out"] = "\n".join(lines) + ("\n" if lines else "")


def commands(limit: float) -> dict[str, dict[str, Any]]:
    """All tool outputs, side by side; nvidia-smi one call at a time: once it hangs it is not asked again."""
    jobs = dict(
        COMMANDS,
        packages=DPKG + PACKAGES,
        units=["systemctl", "show", "-p", "Id,LoadState,ActiveState,UnitFileState", *UNITS],
    )
    answers: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = {
            name: pool.submit(run, command, limit) for name, command in jobs.items() if command[0] != "nvidia-smi"
        }
        hung = ""
        for name, command in jobs.items():
            if command[0] != "nvidia-smi":
                continue
            if hung:
                answers[name] = {"rc": None, "out": "", "err": hung, "seconds": 0.0}
                continue
            answers[name] = run(command, limit)
            if answers[name]["rc"] is None:
                hung = answers[name]["err"]
        answers.update((name, job.result()) for name, job in others.items())
    keep_lines(answers["modinfo"], MODINFO_KEEP)
    keep_lines(answers["apt_config"], APT_KEEP)
    return answers


def acs(config: bytes) -> list[int] | None:
    """[capability, control] words of the ACS extended capability (id 0x000d), None where there is none.

    Layout: PCI Express Base Specification, "ACS Extended Capability": capability at +4, control at +6.
    """
    offset = 0x100
    for _ in range(64):  # a broken list must not loop for ever
        header = int.from_bytes(config[offset : offset + 4], "little")
        if len(config) < offset + 8 or header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == 0x000D:
            return [int.from_bytes(config[offset + at : offset + at + 2], "little") for at in (4, 6)]
        offset = header >> 20
        if offset < 0x100:
            return None
    return None


def attribute(folder: str, name: str) -> str | None:
    """One sysfs attribute without its newline, None where it cannot be read."""
    try:
        with open(os.path.join(folder, name)) as stream:
            return stream.read().strip()
    except OSError:
        return None


def aer(folder: str) -> dict[str, int]:
    """PCIe errors of a device since boot, by severity (Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats)."""
    counts: dict[str, int] = {}
    for name in ("fatal", "nonfatal", "correctable"):
        rows = [line.split() for line in (attribute(folder, "aer_dev_" + name) or "").splitlines()]
        counts.update((name, int(row[1])) for row in rows if len(row) == 2 and row[0].startswith("TOTAL_ERR"))
    return counts


def clique(config: bytes) -> bool | None:
    """Whether a hypervisor put x-nv-gpudirect-clique into a card: a vendor's capability (9) with "P2P" in it.

    Layout: QEMU hw/vfio/pci-quirks.c, vfio_add_nv_gpudirect_cap. None without the rights to read it.
    """
    if len(config) <= 64:
        return None
    offset = config[0x34]
    for _ in range(48):  # a broken list must not loop for ever
        if offset < 0x40 or offset + 8 > len(config):
            return False
        if config[offset] == 9 and config[offset + 3 : offset + 6] == b"P2P":
            return True
        offset = config[offset + 1]
    return False


def bars(folder: str) -> list[int]:
    """Sizes in bytes of the six BARs."""
    sizes = []
    for line in (attribute(folder, "resource") or "").splitlines()[:6]:
        start, end = (int(word, 16) for word in line.split()[:2])
        sizes.append(end - start + 1 if end else 0)
    return sizes


def pci_device(address: str) -> dict[str, Any]:
    """One PCI device as sysfs shows it; "path" names the host bridge and the devices above it, root first."""
    folder = "/sys/bus/pci/devices/" + address
    real = os.path.realpath(folder)
    device: dict[str, Any] = {
        name: attribute(folder, name)
        for name in (
            "vendor",
            "device",
            "class",
            "numa_node",
            "current_link_speed",
            "max_link_speed",
            "current_link_width",
            "max_link_width",
        )
    }
    driver = os.path.join(folder, "driver")
    device.update(
        address=address,
        path=[part for part in real.split("/") if part.startswith("pci") or part.count(":") == 2][:-1],
        driver=os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else None,
        bars=bars(folder),
        aer=aer(folder),
    )
    try:
        with open(folder + "/config", "rb") as stream:
            config = stream.read(4096)
    except OSError:
        config = b""
    # Without privilege the kernel shows the first 64 bytes only; a device without extended space has 256.
    return device | {"acs_readable": len(config) > 64, "acs": acs(config), "clique": clique(config)}


def pci() -> list[dict[str, Any]]:
    """The NVIDIA display controllers and every bridge above them."""
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(glob.glob("/sys/bus/pci/devices/*")):
        if attribute(folder, "vendor") != NVIDIA or not (attribute(folder, "class") or "").startswith("0x03"):
            continue
        if os.path.exists(folder + "/physfn"):
            continue  # a virtual function, which is for a guest (SR-IOV)
        gpu = pci_device(os.path.basename(folder))
        found[gpu["address"]] = gpu
        for above in gpu["path"]:
            if not above.startswith("pci") and above not in found:
                found[above] = pci_device(above)
    return [found[address] for address in sorted(found)]


def cpus() -> dict[str, Any]:
    """Vendor, family and model of the first CPU; counts; the set of frequency governors."""
    first: dict[str, str] = {}
    for line in (read("/proc/cpuinfo", "cpu") or "").split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        first[key.strip()] = value.strip()
    folders = glob.glob("/sys/devices/system/cpu/cpu[0-9]*")
    return {
        "vendor": first.get("vendor_id"),
        "family": first.get("cpu family"),
        "model": first.get("model"),
        "name": first.get("model name"),
        "hypervisor": "hypervisor" in first.get("flags", "").split(),
        "count": os.cpu_count(),
        "sockets": len({attribute(folder, "topology/physical_package_id") for folder in folders} - {None}),
        "governors": sorted({attribute(folder, "cpufreq/scaling_governor") for folder in folders} - {None}),
    }


def iommu() -> dict[str, Any]:
    """Number of IOMMU groups and their default domain types."""
    groups = glob.glob("/sys/kernel/iommu_groups/*")
    return {"groups": len(groups), "types": sorted({attribute(group, "type") for group in groups} - {None})}


def mounts() -> list[tuple[str, str, str]]:
    """(mount point, type, source) of each mount, deepest mount points first."""
    rows = []
    for line in (read("/proc/self/mountinfo", "mounts") or "").splitlines():
        left, _, right = line.partition(" - ")
        kind, source = [*right.split(), "", ""][:2]
        rows.append((left.split()[4].replace("\\040", " "), kind, source))
    return sorted(rows, key=lambda row: -len(row[0]))


def disks(source: str) -> list[dict[str, str | None]]:
    """The physical disks under a block device, through partitions, device mapper and md."""
    name = os.path.basename(os.path.realpath(source))
    if not os.path.exists("/sys/class/block/" + name):
        return []
    folder = os.path.realpath("/sys/class/block/" + name)
    slaves = glob.glob(folder + "/slaves/*")
    if slaves:
        return [disk for slave in sorted(slaves) for disk in disks("/dev/" + os.path.basename(slave))]
    if os.path.exists(folder + "/partition"):
        folder = os.path.dirname(folder)
    return [
        {
            "name": os.path.basename(folder),
            "model": attribute(folder, "device/model"),
            "scheduler": attribute(folder, "queue/scheduler"),
        }
    ]


def data_path(path: str, table: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """File system, free space and disks of the nearest existing folder of a path."""
    here = os.path.realpath(path)
    while not os.path.exists(here):
        here = os.path.dirname(here)
    space = os.statvfs(here)
    mount = next((row for row in table if here == row[0] or here.startswith(row[0].rstrip("/") + "/")), ("/", "", ""))
    return {
        "path": path,
        "exists": os.path.exists(path),
        "mount": mount[0],
        "type": mount[1],
        "source": mount[2],
        "size": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "device": os.stat(here).st_dev,
        "disks": disks(mount[2]) if mount[2].startswith("/dev/") else [],
    }


def accepted() -> list[str]:
    """Configurations whose engine was accepted on this boot: those that run, and the last run of those that ended."""
    with open("/proc/sys/kernel/random/boot_id") as stream:
        boot = stream.read().strip()
    found = set()
    for place, record in ((place, record) for root, record in RECORDS.items() for place in glob.glob(root + "/*/")):
        try:
            told = json.loads(Place(place.rstrip("/")).read(record))
            if told.get("accepted_at") or told.get("accepted_boot") == boot:
                found.add(place.split("/")[-2])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            unknown[place + record] = getattr(error, "strerror", None) or str(error)
    return sorted(found)


def allocated(path: str) -> int:
    """Bytes of a file on its disk; none of one that a staging at work has just moved on."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def model(folder: str) -> dict[str, Any]:
    """config.json and the size of all weight files of a checkpoint; both None where there is none.

    partial: bytes that a staging which has not ended keeps beside it.
    """
    weights = glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))
    config = os.path.join(folder, "config.json")
    begun = os.path.join(os.path.dirname(folder), "." + os.path.basename(folder) + ".partial")
    return {
        "path": folder,
        "config": foreign(config),
        "bytes": sum(os.path.getsize(path) for path in weights) if weights else None,
        "partial": sum(allocated(os.path.join(at, name)) for at, _, names in os.walk(begun) for name in names),
    }


def recorded() -> Iterator[tuple[str, str, str]]:
    """(staged or adopted, name, folder) of the checkpoints that rigctl has a record of."""
    for path in sorted(glob.glob("/var/lib/kimi-rig/checkpoints/*.json")):
        try:
            with open(path) as stream:
                content = json.load(stream)
            yield str(content["origin"]), str(content["name"]), str(content["path"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            unknown["record:" + path] = type(error).__name__ + ": " + str(error)


def processes() -> str:
    """The words and the environment of all processes, each followed by a NUL."""
    texts = []
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, errors="replace") as stream:
                texts.append(stream.read())
        except OSError:
            continue  # it has ended
    return "\0".join(texts)


def shown(path: str) -> str:
    """A path as text, whatever bytes it is of."""
    return os.fsencode(path).decode(errors="replace")


def disk_use(wanted: list[list[str]], table: list[tuple[str, str, str]], limit: float) -> list[dict[str, Any]]:
    """Bytes on disk of all that the patterns find, and of recorded checkpoints; files of several names count once.

    They count with whatever comes first, in the order of `wanted`. used: a process names the path.
    """
    named = [(kind, path, path) for kind, pattern in wanted for path in sorted(glob.glob(pattern))]
    found: dict[str, tuple[str, str]] = {}
    for kind, name, path in [*named, *recorded()]:
        real = os.path.realpath(path)
        if os.path.exists(real):
            found.setdefault(real, (kind, name))
    if not found:
        return []
    answer = run(["du", "-s", "-x", "-0", "--block-size=1", "--", *found], limit)
    if answer["rc"] is None:
        unknown["disk"] = answer["err"]
    sizes = {path: int(count) for count, _, path in (row.partition("\t") for row in answer["out"].split("\0") if row)}
    running = processes()
    return [
        {
            **data_path(real, table),
            "path": shown(real),
            "kind": kind,
            "name": shown(name),
            "bytes": sizes.get(shown(real)),
            "used": real + "/" in running or real + "\0" in running,
        }
        for real, (kind, name) in found.items()
    ]


def toolkits(named: list[str], limit: float) -> dict[str, str]:
    """What nvcc says of its version, by folder: the toolkits asked for, those in /usr/local, the one on PATH."""
    nvcc = shutil.which("nvcc")
    on_path = [os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))] if nvcc else []
    there = {os.path.realpath(home) for home in [*glob.glob("/usr/local/cuda*"), *on_path]}
    found = [home for home in [*named, *sorted(there - set(named))] if os.access(home + "/bin/nvcc", os.X_OK)]
    return {home: run([home + "/bin/nvcc", "--version"], limit)["out"] for home in found}


def ports() -> list[int]:
    """TCP ports that something listens on (state 0A)."""
    found: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read(table) or "").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(found)


def kernels() -> dict[str, bool]:
    """The installed kernels, and whether there is an nvidia module for each."""
    found = {}
    for path in glob.glob("/boot/vmlinuz-*"):
        version = path.partition("vmlinuz-")[2]
        try:
            with open("/lib/modules/" + version + "/modules.dep", errors="replace") as stream:
                found[version] = "/nvidia.ko" in stream.read()
        except OSError:
            continue  # a kernel without modules boots no such host
    return found


def secure_boot() -> bool | None:
    """True, False, or None without UEFI variables. The state follows the four attribute bytes."""
    for path in glob.glob("/sys/firmware/efi/efivars/SecureBoot-*"):
        try:
            with open(path, "rb") as stream:
                return stream.read()[4:5] == b"\x01"
        except OSError as error:
            unknown["secure_boot"] = error.strerror or str(error)
    return None


def probe(url: str) -> str | None:
    """None where a server answers, whatever its status, else why not. The environment's proxies are used."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()  # noqa: S310
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)).strip() or type(error).__name__
    return None


def probes(urls: list[str]) -> dict[str, str | None]:
    """The answer of each URL, asked for side by side."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(urls, pool.map(probe, urls), strict=True))


def sources(options: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    """URLs to probe: those asked for, and the sources of what is yet to be fetched."""
    hubs = [
        url
        for url, folders in sorted(options.get("hubs", {}).items())
        if not all(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")) for folder in folders)
    ]
    cards = any((one["class"] or "").startswith("0x03") for one in devices)
    bare = cards and not os.path.exists("/sys/module/nvidia/version") and options.get("driver_source")
    return list(dict.fromkeys([*options.get("probes", []), *hubs, *([options["driver_source"]] if bare else [])]))


def section(name: str, reader: Callable[..., Any], *arguments: Any) -> Any:
    """A reader's value; whatever goes wrong in it costs this section and no other."""
    try:
        return reader(*arguments)
    except Exception as error:
        unknown[name] = f"{type(error).__name__}: {error}"
        return None


def stored(options: dict[str, Any]) -> dict[str, Any]:
    """What lies on the disks, and what room there is."""
    table, limit = section("mounts", mounts) or [], options.get("timeout", 20)
    asked = ["/", SHM, *options.get("paths", [])]
    return {
        "paths": [one for one in (section("paths:" + path, data_path, path, table) for path in asked) if one],
        "models": [section("model:" + path, model, path) for path in options.get("models", [])],
        "environments": [
            os.path.dirname(mark) for mark in sorted(glob.glob(options.get("environments", "") + "/*/*/kimi-rig.json"))
        ],
        "disk": section("disk", disk_use, options.get("disk", []), table, limit) or [],
    }


def collect(options: dict[str, Any]) -> dict[str, Any]:
    """The whole document."""
    begin = time.monotonic()
    limit = options.get("timeout", 20)
    if options.get("only_disk"):
        nothing: dict[str, Any] = {key: {} for key in ("files", "commands", "cpu", "iommu", "sysctls", "probes")}
        nothing |= {key: [] for key in ("exists", "pci", "device_nodes")}
        return {"schema": SCHEMA, **nothing, **stored(options), "unknown": unknown}
    devices = section("pci", pci) or []
    facts = {
        "schema": SCHEMA,
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "files": files(),
        "exists": [path for path in EXISTS if os.path.exists(path)],
        "commands": section("commands", commands, limit) or {},
        "pci": devices,
        "cpu": section("cpu", cpus) or {},
        "iommu": section("iommu", iommu) or {},
        "sysctls": {
            name: (read("/proc/sys/" + name.replace(".", "/"), "sysctl:" + name) or "").strip() or None
            for name in SYSCTLS
        },
        "device_nodes": sorted(os.path.basename(path) for path in glob.glob("/dev/nvidia[0-9]*")),
        **stored(options),
        "toolkits": section("toolkits", toolkits, options.get("toolkits", []), limit) or {},
        "gcc": run(["gcc", "-dumpfullversion"], limit)["out"] if shutil.which("gcc") else None,
        "accepted": section("accepted", accepted) or [],
        "ports": section("ports", ports),
        "kernels": section("kernels", kernels) or {},
        "secure_boot": section("secure_boot", secure_boot),
        "glibc": section("glibc", os.confstr, "CS_GNU_LIBC_VERSION"),
        "probes": section("probes", probes, sources(options, devices)) or {},
    }
    facts["unknown"] = unknown
    facts["seconds"] = round(time.monotonic() - begin, 3)
    return facts


if __name__ == "__main__":
    json.dump(collect(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}), sys.stdout, sort_keys=True)
    sys.stdout.write("\n")
    sys.stdout.flush()
    # Threads or children stuck in the driver must not hold the exit back.
    os._exit(0)
