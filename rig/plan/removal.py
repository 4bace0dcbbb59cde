"""What an uninstall removes and what it keeps: decided here, from the record and the host. Pure."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from rig.facts.created import Created
from rig.host.system_files import GRUB_DROP_IN, KERNEL_CMDLINE, MODPROBE, OUR_ARGUMENTS
from rigctl.contract import layout

INITRAMFS = "if command -v update-initramfs >/dev/null; then update-initramfs -u -k all >/dev/null; fi"

# Where the record lists one of these directories, all in it is ours: services and jobs make more than it can list.
OURS_WHOLE = (
    layout.HOSTKIT,
    layout.CONFIGURATIONS,
    layout.CREDENTIALS,
    layout.EDGE,
    layout.LOCKS,
    layout.PATCHES,
    layout.KERNELS,
    layout.CACHE,
    layout.STATES,
    layout.LOGS,
)
UNIT_TYPES = (".service", ".socket", ".timer", ".path", ".target", ".mount", ".slice")


def trees(created: Created) -> list[str]:
    """Directories to remove with all in them; never one whose checkpoint the operator brought."""
    brought = set(created.names("tree", "work")).difference(created.adopted)
    found = {*brought, *(path for path in created.names("directory") if path in OURS_WHOLE)}
    return sorted(path for path in found if not _below_any(path, found - {path}))


def files(created: Created) -> list[str]:
    """Files and links to remove; those in a tree go with it."""
    whole = trees(created)
    return [path for path in created.names("file", "link") if not _below_any(path, whole)]


def units(created: Created) -> list[str]:
    """Names of systemd units among the files."""
    paths = map(PurePosixPath, created.names("file", "link"))
    return [path.name for path in paths if str(path.parent) == layout.UNITS and path.suffix in UNIT_TYPES]


def boot_refreshes(removed: Iterable[str]) -> list[str]:
    """Script lines that let boot loader and initial ram disk forget the files removed; run after the removal."""
    paths = list(removed)
    lines = []
    if GRUB_DROP_IN in paths:
        lines.append("if command -v update-grub >/dev/null; then update-grub >/dev/null 2>&1; fi")
    if MODPROBE in paths:
        lines.append(INITRAMFS)
    return lines


def kernel_command_line() -> list[str]:
    """Script lines that take our arguments out of /etc/kernel/cmdline, which is the system's file (systemd-boot)."""
    return [
        f'set -f; ours=" $(cat {OUR_ARGUMENTS}) "; rest=',
        f"for w in $(cat {KERNEL_CMDLINE} 2>/dev/null || true); do "
        'case "$ours" in *" $w "*) ;; *) rest="$rest $w";; esac; done; set +f',
        f'[ ! -e {KERNEL_CMDLINE} ] || {{ echo "${{rest# }}" > {KERNEL_CMDLINE}.kimi-rig; '
        f"mv -fT {KERNEL_CMDLINE}.kimi-rig {KERNEL_CMDLINE}; }}",
        'for k in /boot/vmlinuz-*; do [ ! -e "$k" ] || kernel-install add "${k#/boot/vmlinuz-}" "$k"; done',
        f"rm -f {OUR_ARGUMENTS}",
    ]


def directories(created: Created) -> tuple[list[str], dict[str, list[str]]]:
    """Directories to remove, deepest first, and those kept: directory -> what in it is not ours."""
    goes = {*trees(created), *files(created), layout.STATE}
    removed: list[str] = []
    kept: dict[str, list[str]] = {}
    ours = (path for path in created.names("directory") if not _below_any(path, trees(created)))
    for path in sorted(ours, key=lambda name: (-name.count("/"), name)):
        foreign = [inside for inside in created.inside.get(path, []) if inside not in goes and not _temporary(inside)]
        if foreign:
            kept[path] = sorted(foreign)
        else:
            removed.append(path)
            goes.add(path)
    return removed, kept


def packages(ours: Iterable[str], removed_with: Mapping[str, set[str]]) -> tuple[list[str], dict[str, list[str]]]:
    """Packages to remove, and those kept: package -> what needs it that is not ours.

    removed_with: see PackagesRemovedWith; without an entry a package's removal takes nothing foreign along.
    """
    mine = set(ours)
    needed = {name: sorted(removed_with.get(name, set()) - mine) for name in sorted(mine)}
    return [name for name, by in needed.items() if not by], {name: by for name, by in needed.items() if by}


def temporaries(path: str) -> str:
    """Shell pattern of the temporary file that a killed deploy may have left beside a file of ours."""
    parsed = PurePosixPath(path)
    return f"{parsed.parent}/.{parsed.name}.kimi-rig."


def _temporary(path: str) -> bool:
    return ".kimi-rig." in PurePosixPath(path).name or path.endswith(".kimi-rig")


def _below_any(path: str, parents: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(parent) for parent in parents)
