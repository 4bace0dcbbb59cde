"""The one way to run what others wrote: as the builder, a system user of its own, in a transient unit.

Downloads, build scripts and compilers, programs of an engine's environment and imports of its modules run so, and never
as root. The unit has the sandbox of a serving unit: it sees the file system read-only but for the directories it is
given, has no network unless it is given one, and nothing of it outlives the command. What it leaves is the builder's
until root has checked it (`publish`), or copied it by descriptor (`copied`).
"""

import errno
import fcntl
import hashlib
import os
import pwd
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rigctl.contract import confinement, layout
from rigctl.errors import RigctlError

SANDBOX = (
    *confinement.SANDBOX,
    f"User={layout.BUILDER}",
    f"Group={layout.BUILDER}",
    "UMask=0022",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    # Sources that an operator keeps in a home are bound into it one by one.
    "ProtectHome=tmpfs",
    "WorkingDirectory=/tmp",
    "TemporaryFileSystem=/dev/shm:mode=1777",
    # Of one user in two units neither can look into the other.
    "PrivateUsers=yes",
    "ProtectProc=invisible",
    "RemoveIPC=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    f"InaccessiblePaths=-{layout.CREDENTIALS}",
    "DevicePolicy=closed",
    # An engine that finds no GPU answers other questions than it will be asked.
    *(f"DeviceAllow=char-{name} rw" for name in ("nvidia", "nvidia-uvm", "nvidia-caps", "nvidiactl")),
    "LimitCORE=0",
    # What the command started is asked to end with it, then made to.
    "KillMode=mixed",
    "TimeoutStopSec=20",
    "OOMPolicy=continue",
)
"""Properties of a unit that runs what others wrote."""

Network = Literal["none", "loopback", "any"]
NETWORKS: Mapping[Network, tuple[str, ...]] = {
    "none": ("PrivateNetwork=yes",),
    "loopback": ("IPAddressDeny=any", "IPAddressAllow=localhost"),
    "any": (),
}
RUN = Path("/run")
"""Root's alone, and gone with the boot."""
FOREIGN_HOMES = ("/home/", "/root/", "/run/user/")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",  # ldconfig is no program of /usr/bin
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108  # the unit's own
}
PASSED = re.compile(r"(?i)^(\w+_proxy|ssl_cert_(file|dir)|\w+_ca_bundle)$")
"""Variables of ours that a command with a network gets too."""
WITHOUT = "KIMI_RIG_WITHOUT_SANDBOX"
"""Environment variable for the processes of a program that is `unconfined`."""
_confined = True
LARGEST = 8 << 30
"""Bytes of a wheel: several times what any has."""
LONGEST = 1 << 20
"""Characters of a line of a builder's: more than any answer has."""
MOST = 64 << 20
"""Characters of all its lines, which go to root's journal."""
INTERPRETER = re.compile(r"/usr/bin/python3(\.\d+)?")
"""Where the links of an environment may lead outside it."""


@dataclass(frozen=True)
class User:
    """The builder, as the system knows it."""

    uid: int
    gid: int


def unconfined() -> None:
    """From here on this process runs what others wrote as itself: for a maintainer's machine, which is no host."""
    global _confined  # noqa: PLW0603  # a program decides it once, before anything else
    _confined = False


def user() -> User:
    """The builder. Raises RigctlError where there is none that may be used."""
    if not _confined:
        return User(os.geteuid(), os.getegid())
    try:
        found = pwd.getpwnam(layout.BUILDER)
    except KeyError:
        raise RigctlError(
            f"the system user {layout.BUILDER} does not exist on this host, and root runs nothing that others wrote: "
            "deploy, which creates it"
        ) from None
    if found.pw_uid == 0:
        raise RigctlError(f"{layout.BUILDER} has the user id 0 on this host: give that name a user id of its own")
    return User(found.pw_uid, found.pw_gid)


def needed() -> bool:
    """Whether this process is root's, and so may run nothing that others wrote."""
    return _confined and os.geteuid() == 0 and WITHOUT not in os.environ


def inside() -> None:
    """Called before what others wrote is run without a further sandbox. Raises RigctlError in a process of root's."""
    if needed():
        raise RigctlError(f"root runs nothing that others wrote: {layout.BUILDER} does (rigctl/builder.py)")


@contextmanager
def sandboxed(  # noqa: PLR0913  # what a command may do differs from one to the next
    argv: Sequence[str | Path],
    *,
    unit: str,
    writes: Sequence[Path] = (),
    reads: Sequence[Path] = (),
    network: Network = "none",
    environment: Mapping[str, str] | None = None,
    seconds: float = 24 * 3600,
    properties: Sequence[str] = (),
) -> Iterator[list[str]]:
    """The command line that runs `argv` as the builder, for `subprocess`: with its streams and its exit code.

    unit: last part of the unit's name; one of that name that still runs is ended first. writes: directories of the
    builder (`handed_over`). reads: what it reads, where that may lie in a home. environment: all that it gets besides a
    path, a language and a home. seconds: after these systemd ends it. Nothing of it runs any more when the block ends.
    Raises RigctlError.
    """
    user()
    passed = {key: value for key, value in os.environ.items() if network == "any" and PASSED.match(key)}
    content = {**ENVIRONMENT, **passed, **(environment or {})}
    if not _confined:
        with tempfile.TemporaryDirectory(prefix="rigctl-builder-") as home:
            content = {"TMPDIR": home, **content, "HOME": home, "PATH": os.environ["PATH"], WITHOUT: "1"}
            yield ["env", "-i", *(f"{key}={value}" for key, value in content.items()), *map(str, argv)]
        return
    name = _unit_name(unit)
    homes = [path for each in (*reads, *writes) if (path := str(each.resolve())).startswith(FOREIGN_HOMES)]
    wanted = [
        *SANDBOX,
        *NETWORKS[network],
        *(f"ReadWritePaths={_word(path)}" for path in writes),
        *(f"BindPaths={_word(path)}" for path in dict.fromkeys(homes)),
        f"RuntimeMaxSec={seconds:.0f}",
        *_ends_with(own_unit()),
        *properties,
    ]
    _end(name)
    # Not in the unit's properties, which every user may ask systemd for.
    with tempfile.NamedTemporaryFile("w", prefix=".kimi-rig-builder-", dir=RUN, encoding="utf-8") as variables:
        variables.write("".join(f"{key}={_quoted(value)}\n" for key, value in content.items()))
        variables.flush()
        options = [f"--property={each}" for each in [*wanted, f"EnvironmentFile={variables.name}"]]
        command = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--service-type=exec", f"--unit={name}"]
        try:
            # systemd takes $ in an argument for a variable.
            yield [*command, *options, "--", *(str(word).replace("$", "$$") for word in argv)]
        finally:
            _end(name)


def spoken(argv: Sequence[str | Path], given: str = "", reply: str | None = None, **limits: Any) -> tuple[int, str]:
    """Run a command of `sandboxed` (limits: its arguments) with a text on its input, and print what it says.

    reply: how a line begins that is not printed. Exit code, and the last such line, else the last one that is not
    empty. It never holds the terminal of who looks on.
    """
    with sandboxed(argv, **limits) as command:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            return heard(process, given, reply)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def heard(process: "subprocess.Popen[str]", given: str, reply: str | None) -> tuple[int, str]:
    """Of `spoken`, what comes after the start."""
    replied, last, left = "", "", MOST
    for stdin in filter(None, [process.stdin]):
        with suppress(BrokenPipeError):  # it ended at once, and says why
            stdin.write(given)
            stdin.close()
    while process.stdout and (line := process.stdout.readline(LONGEST)):
        if (left := left - len(line)) < 0:
            raise RigctlError(f"ended: it has said more than {MOST >> 20} million characters, the last {line[:100]!r}")
        if reply and line.startswith(reply):
            replied = line
        else:
            last = line.strip() or last
            print(line.rstrip("\n"), flush=True)
    return process.wait(), replied or last


def _unit_name(unit: str) -> str:
    return f"kimi-job-builder-{re.sub(r'[^A-Za-z0-9._-]', '-', unit)}.service"


def lent(unit: str, name: str, path: str | Path) -> tuple[str, list[str]]:
    """A file that root alone can read, for a command of `sandboxed` with this unit: where it lies, and properties."""
    if not _confined:
        return str(path), []
    return f"/run/credentials/{_unit_name(unit)}/{name}", [f"LoadCredential={name}:{path}"]


def own_unit(groups: Path = Path("/proc/self/cgroup")) -> str | None:
    """The unit of ours that this process is in: a job of a deploy; None in a login."""
    for line in groups.read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith("kimi-") and name.endswith(".service"):
            return name
    return None


def _ends_with(job: str | None) -> list[str]:
    """A job that is killed takes its builder along; one that is stopped, first its builder."""
    return [f"BindsTo={job}", f"After={job}"] if job else []


def _end(name: str) -> None:
    """The unit is gone, with every process in it. Raises RigctlError where it will not go."""
    known = subprocess.run(["systemctl", "is-active", name], capture_output=True, errors="replace", check=False)
    if known.stdout.strip() in ("inactive", "failed", "unknown", ""):
        return
    done = subprocess.run(["systemctl", "stop", name], capture_output=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RigctlError(f"{name} could not be ended: {done.stderr.strip()}")


def _word(path: str | Path) -> str:
    """A path in a list of paths, where a blank parts two and a colon source from target."""
    return f'"{path}"' if re.search(r"[\s:]", str(path)) else str(path)


def _quoted(value: str) -> str:
    """A value in a file of variables (systemd.exec(5), EnvironmentFile=)."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


# What passes between root and the builder


def handed_over(directory: Path) -> Path:
    """A directory of the builder's in one of root's: made, or one that root alone has used so far with all in it.

    A link is root's own, and leads on. Raises RigctlError for one of another user.
    """
    builder = user()
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    owner = directory.stat().st_uid
    if owner not in (0, builder.uid):
        raise RigctlError(f"{directory} belongs to user {owner}: move it away and deploy again")
    if owner == 0 != builder.uid:
        for _, folders, files, descriptor in os.fwalk(directory, topdown=False):
            for name in (*folders, *files):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                # A second name may be one that root goes on using.
                if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
                    os.chown(name, builder.uid, builder.gid, dir_fd=descriptor, follow_symlinks=False)
        os.chown(directory, builder.uid, builder.gid)  # last: what was interrupted is done again
    return directory


def copied(base: Path, name: str, target: Path, limit: int = LARGEST) -> str:
    """Copy a file that another user may have made; its sha256. No link on the way is followed, no pipe waited for.

    base: a directory whose own path nobody else can change. name: of the file, below it. Raises OSError, and
    RigctlError for anything but a regular file of at most `limit` bytes.
    """
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *folders, last = PurePosixPath(name).parts
        for part in folders:
            above, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(above)
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise RigctlError(f"{base}/{name}: a symbolic link leads there: it is not used") from None
        raise OSError(error.errno, error.strerror, f"{base}/{name}") from None
    finally:
        os.close(folder)
    with os.fdopen(file, "rb") as content, target.open("wb") as copy:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise RigctlError(f"{base}/{name} is no regular file of at most {limit >> 20} MiB: it is not used")
        digest, left = hashlib.sha256(), limit
        while (block := content.read(1 << 20)) and (left := left - len(block)) >= 0:
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


def publish(tree: Path) -> None:
    """Make root's what the builder left in `tree`, a directory in one of root's. Nothing of the builder's runs in it.

    Files and directories of the builder alone, no special file, no setuid or setgid file, no link that leads out of it
    (but to the system's Python). Afterwards nobody but root can write it, and everybody can read it. Raises RigctlError
    that names what it refuses; then the top directory is still the builder's.
    """
    builder = user()
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(top).st_uid != builder.uid:
            raise _refused(str(tree), f"does not belong to {layout.BUILDER}")
        _publish(top, str(tree), 0, builder)
        _to_root(top, 0o755)
    finally:
        os.close(top)


def _publish(folder: int, where: str, depth: int, builder: User) -> None:
    for name in os.listdir(folder):
        path = f"{where}/{name}"
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if status.st_uid != builder.uid:
            raise _refused(path, f"belongs to user {status.st_uid}, not to {layout.BUILDER}")
        if stat.S_ISLNK(status.st_mode):
            if not _leads_inside(os.readlink(name, dir_fd=folder), depth):
                raise _refused(path, f"is a symbolic link out of it, to {os.readlink(name, dir_fd=folder)!r}")
            os.chown(name, os.geteuid(), os.getegid(), dir_fd=folder, follow_symlinks=False)
            continue
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            raise _refused(path, "is neither file, directory nor link")
        entry = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if stat.S_ISDIR(status.st_mode):
                _publish(entry, path, depth + 1, builder)
                _to_root(entry, 0o755)
            elif status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                raise _refused(path, "has the setuid or setgid bit")
            else:
                _to_root(entry, 0o755 if status.st_mode & stat.S_IXUSR else 0o644)
                if _written(entry):
                    raise _refused(path, "is still open for writing elsewhere")
        finally:
            os.close(entry)


def _to_root(descriptor: int, mode: int) -> None:
    os.fchown(descriptor, os.geteuid(), os.getegid())
    for name in _attributes(descriptor):
        # An access list would let its writer go on writing.
        if name.startswith("system.posix_acl"):
            os.removexattr(descriptor, name)
    os.fchmod(descriptor, mode)


def _written(file: int) -> bool:
    """Whether a process has it open for writing, as one may to whom the builder handed a descriptor of it.

    fcntl(2), Leases: a read lease is refused then. False where the file system knows no leases.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _attributes(descriptor: int) -> list[str]:
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return []


def _leads_inside(target: str, depth: int) -> bool:
    """Whether a link at this depth of a tree stays in it. Dots after a name could go through another link, and out."""
    if INTERPRETER.fullmatch(target):
        return True
    words = target.split("/")
    upwards = next((number for number, word in enumerate(words) if word != ".."), len(words))
    return not target.startswith("/") and upwards <= depth and ".." not in words[upwards:]


def _refused(path: str, why: str) -> RigctlError:
    return RigctlError(
        f"{path} {why}: nothing of what was built there is used. What was installed is not to be trusted: find out "
        "which package or build script made it before you deploy again"
    )
