"""The box's file system: the root made by mmdebstrap or debootstrap, settings written before each boot.

As a program it makes the root of the default box, while pip installs what all else of ours needs: it needs the standard
library alone.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rig.sandbox.box import ADDRESS, Box, SandboxError, State, write_atomic
from rig.sandbox.machine import RELEASE, Machine, has_password, survey
from rigctl.contract.foreign import gated

PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "ca-certificates"),
    *("sudo", "iproute2", "procps"),
)
LOGIN_PACKAGES = ("zsh",)  # for a login other than root: its shell
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
LEAST_FREE = 8_000_000_000  # bytes: the root, an engine environment of about 3 GB beside its predecessor
NETWORK_TROUBLE = re.compile(
    r"(?i)could not (connect|resolve)|temporary failure resolving|unable to connect|failed to fetch"
    r"|connection (failed|refused|timed out)|not reachable|couldn't download"
)


def say(box: Box, text: str) -> None:
    print(f"{box.name}: {text}", flush=True)


@contextmanager
def phase(box: Box, done: str) -> Iterator[None]:
    """Say what was done and how long it took."""
    begin = time.monotonic()
    yield
    say(box, f"{done} ({time.monotonic() - begin:.1f} s)")


@contextmanager
def locked(box: Box) -> Iterator[int]:
    """One command at a time per box; the descriptor keeps the lock for a child that outlives us."""
    box.base.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(box.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(box, "another command is at work on it; waiting")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def claim(box: Box) -> None:
    """Make the box's directory, or see that it is ours; an empty one may become ours."""
    directory = box.directory
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise SandboxError(f"{directory} is no directory; use another --name, or another KIMI_RIG_SANDBOX_DIR")
    if directory.exists() and not box.marker.is_file() and any(directory.iterdir()):
        raise SandboxError(
            f"{directory} exists and is not a box of ours (no {box.marker.name} in it); "
            "use another --name, or another KIMI_RIG_SANDBOX_DIR"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(box.marker, f"{box.name}\n")


def find_tool(name: str) -> str | None:
    """Path of a program, also from the system directories that a user's PATH may lack."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def missing_packages(
    tool: Callable[[str], str | None] = find_tool, build: bool = True, keyring: Path = KEYRING
) -> list[str]:
    """Debian packages this computer lacks to boot a box and, with `build`, to make its root."""
    packages = [] if tool("systemd-nspawn") else ["systemd-container"]
    packages += [] if tool("ssh") and tool("ssh-keygen") else ["openssh-client"]
    if build and not tool("mmdebstrap") and not tool("debootstrap"):
        packages.append("mmdebstrap")
    if build and not keyring.exists():
        packages.append("debian-archive-keyring")
    return packages


def install_packages(box: Box, packages: Sequence[str], tool: Callable[[str], str | None] = find_tool) -> None:
    """Install `packages` by apt, reading the package lists anew when that is what it takes."""
    apt = tool("apt-get")
    if apt is None:
        raise SandboxError(f"{', '.join(packages)}: not installed, and this machine has no apt; install them yourself")
    log = box.directory / "apt.log"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = [apt, "install", "-y", "--no-install-recommends", *packages]
    with log.open("w") as output:
        for command in (install, [apt, "update"], install):
            code = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode
            if code == 0 and command is install:
                return
    if "mmdebstrap" in packages:
        install_packages(box, ["debootstrap" if name == "mmdebstrap" else name for name in packages], tool)
        return
    raise SandboxError(f"apt-get install {' '.join(packages)}: {last_trouble(log)}")


def last_trouble(log: Path) -> str:
    """One line on why a download or install failed, out of its log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "W: Failed", "Err:"))] or lines or ["no output"]
    advice = ""
    if unreached := [line for line in errors if NETWORK_TROUBLE.search(line)]:
        errors = unreached
        advice = "; the package mirror was not reached: check network, http_proxy, apt's Acquire::http::Proxy"
    return f"{errors[-1]} (all of it in {log}){advice}"


def check_free(path: Path, least: int = LEAST_FREE) -> None:
    """SandboxError when the file system of `path` has less than `least` bytes free."""
    free = shutil.disk_usage(path).free
    if free < least:
        raise SandboxError(
            f"{path}: {free / 1e9:.1f} GB free, the box needs {least / 1e9:.0f} GB; "
            "free some, or set KIMI_RIG_SANDBOX_DIR to a directory on a larger disk"
        )


def box_packages(login: str) -> tuple[str, ...]:
    """Debian packages of a box whose login is `login`."""
    return PACKAGES if login == "root" else PACKAGES + LOGIN_PACKAGES


def bootstrap_command(
    root: Path, machine: Machine, tool: Callable[[str], str | None] = find_tool, login: str = "root"
) -> list[str]:
    """Argv that makes the root; the sources go to mmdebstrap's standard input."""
    mmdebstrap = tool("mmdebstrap")
    include = f"--include={','.join(box_packages(login))}"
    # A mount namespace of its own: both mount below the root, and nothing stays mounted there when they are killed.
    apart = ["unshare", "--mount"]
    if mmdebstrap is None:
        return [*apart, tool("debootstrap") or "debootstrap", "--variant=minbase", include, RELEASE, str(root)]
    # Without a sync for each file, now and in the box: what a power failure would spoil is made again.
    options = ["--dpkgopt=force-unsafe-io", *(f"--aptopt={option}" for option in machine.apt_options)]
    sources = ["-"] if machine.apt_sources else []
    return [*apart, mmdebstrap, "--mode=root", "--variant=minbase", include, *options, RELEASE, str(root), *sources]


def make(box: Box, machine: Machine, state: State, lock: int) -> None:
    """Make the box's root and install what this computer lacks for it, as far as they are not there."""
    built = box.stamp.is_file()
    if packages := missing_packages(build=not built):
        with phase(box, f"{', '.join(packages)} installed"):
            install_packages(box, packages)
    if built:
        return
    say(box, "half-made root found; making it again" if box.root.exists() else "making its root (about 30 s)")
    box.limits.unlink(missing_ok=True)
    with phase(box, "root made"):
        build_root(box, machine, state, lock)


def build_root(box: Box, machine: Machine, state: State, lock: int) -> None:
    """Make the box's root and stamp it.

    The lock's descriptor is handed to the build: if we are killed, the next command waits until it has ended.
    """
    check_free(box.directory)
    remove_tree(box.root)
    log = box.directory / "build.log"
    sources = "".join(f"{line}\n" for line in machine.apt_sources)
    with log.open("w") as output:
        done = subprocess.run(
            bootstrap_command(box.root, machine, login=state.login),
            input=sources,
            stdout=output,
            stderr=output,
            errors="replace",
            pass_fds=(lock,),
            check=False,
        )
    if done.returncode != 0:
        raise SandboxError(f"making the box's root failed: {last_trouble(log)}")
    for key in (box.root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    write_atomic(box.root / "etc/default/locale", "LANG=C.UTF-8\n")
    if state.login != "root":
        _add_user(box.root, state.login)
    stamp = {"release": RELEASE, "packages": box_packages(state.login)}
    write_atomic(box.stamp, json.dumps(stamp, indent=2) + "\n")


def _add_user(root: Path, login: str) -> None:
    """A user like a rented host's: own group, no password, sudo without one, zsh, and files nobody else may read."""
    subprocess.run(["chroot", str(root), "useradd", "-m", "-s", "/usr/bin/zsh", login], check=True)
    home = root / "home" / login
    write_atomic(home / ".zshenv", "umask 077\n")
    owner = home.stat()
    os.chown(home / ".zshenv", owner.st_uid, owner.st_gid)
    write_atomic(root / "etc/sudoers.d/90-kimi-rig", f"{login} ALL=(ALL) NOPASSWD:ALL\n", 0o440)


def mounts_below(directory: Path, mountinfo: str) -> list[str]:
    """Mount points at or below `directory`, given the text of /proc/self/mountinfo."""
    points = [line.split()[4].encode().decode("unicode_escape") for line in mountinfo.splitlines() if line]
    return [point for point in points if Path(point).is_relative_to(directory)]


def remove_tree(directory: Path) -> None:
    """Delete a directory of ours; never across a mount point, never through a link."""
    if directory.is_symlink():
        raise SandboxError(f"{directory} is a link, not a directory of ours; remove it yourself")
    if not directory.exists():
        return
    mounted = mounts_below(directory.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    if mounted:
        raise SandboxError(f"{mounted[-1]} is mounted; unmount it, then run the command again")
    command = ["rm", "-rf", "--one-file-system", "--", str(directory)]
    if subprocess.run(command, check=False).returncode != 0:
        raise SandboxError(f"{directory} could not be deleted; see the message of rm above")


def make_keys(box: Box) -> None:
    """The key that opens the box and the key by which it is known, both Ed25519, made once."""
    for path, comment in ((box.key, f"kimi-rig {box.name}"), (box.host_key, f"kimi-rig {box.name} host")):
        if path.exists() and path.with_suffix(".pub").exists():
            continue
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)


def sshd_settings(state: State) -> str:
    root_login = "prohibit-password" if state.login == "root" else "no"
    return f"""\
Port {state.port}
ListenAddress {ADDRESS}
HostKey /etc/ssh/ssh_host_ed25519_key
AllowUsers {state.login}
PermitRootLogin {root_login}
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


def furnish(box: Box, machine: Machine, state: State) -> None:
    """Write into the root, before a boot, all that depends on this computer and on the port."""
    root = box.root
    home = root / ("root" if state.login == "root" else f"home/{state.login}")
    public = box.key.with_suffix(".pub").read_text(encoding="utf-8")
    write_atomic(root / "etc/hostname", f"{box.name}\n")
    write_atomic(root / "etc/hosts", _hosts(box.name, Path("/etc/hosts")))
    write_atomic(root / "etc/ssh/sshd_config.d/10-kimi-rig.conf", sshd_settings(state))
    write_atomic(root / "etc/ssh/ssh_host_ed25519_key", box.host_key.read_text(encoding="utf-8"), 0o600)
    write_atomic(home / ".ssh/authorized_keys", public, 0o600)
    (home / ".ssh").chmod(0o700)
    owner = home.stat()
    for ours in (home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(ours, owner.st_uid, owner.st_gid)
    for path, text in machine_files(machine).items():
        if text:
            write_atomic(root / path, text, 0o600 if has_password(text) else 0o644)
        else:
            (root / path).unlink(missing_ok=True)
    (root / "etc/apt/apt.conf.d/99mmdebstrap").unlink(missing_ok=True)
    for key in re.findall(r"signed-by=(/[^\s\],]+)", " ".join(machine.apt_sources)):
        if Path(key).is_file() and not (root / key[1:]).exists():
            (root / key[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(key, root / key[1:])
    for target, text in box.ssh_settings(state).items():
        write_atomic(target, text)


def machine_files(machine: Machine) -> dict[str, str]:
    """Files of the box that carry this computer's settings, by path; an empty text means: no such file.

    /etc/environment reaches every SSH command and sudo (pam_env), DefaultEnvironment the box's services.
    """
    environment = "".join(f'{name}="{value}"\n' for name, value in sorted(machine.environment.items()))
    pip = "".join(f"{key} = {value}\n" for key, value in _indented(machine.pip).items())
    return {
        "etc/environment": environment,
        "etc/systemd/system.conf.d/50-kimi-rig.conf": _default_environment(machine.environment),
        "etc/pip.conf": f"[global]\n{pip}" if pip else "",
        "etc/uv/uv.toml": machine.uv_toml,
        "etc/apt/apt.conf.d/50kimi-rig": "".join(f"{option}\n" for option in machine.apt_options),
    }


def _indented(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: "\n  ".join(value.split("\n")) for key, value in settings.items()}


def _default_environment(environment: Mapping[str, str]) -> str:
    # Every user of the box can read the manager's environment: no value with a password.
    values = [f"{name}={value}" for name, value in sorted(environment.items()) if not has_password(value)]
    quoted = " ".join(f'"{value}"'.replace("%", "%%") for value in values)
    return f"[Manager]\nDefaultEnvironment={quoted}\n" if quoted else ""


def _hosts(name: str, machine_hosts: Path) -> str:
    text = machine_hosts.read_text(encoding="utf-8") if machine_hosts.exists() else "127.0.0.1 localhost\n"
    return f"127.0.1.1 {name}\n{text}"


def main() -> int:
    """Exit code 1 where the root cannot be made."""
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    box = Box()
    try:
        state = box.planned()
        with locked(box) as lock:
            claim(box)
            make(box, survey(), state, lock)
    except (SandboxError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
