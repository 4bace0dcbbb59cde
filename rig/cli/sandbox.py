"""`kimi-rig sandbox`: the life of a box."""

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import click

from rig.cli.arguments import FAILED, Verb
from rig.sandbox import boot, build, limits
from rig.sandbox.box import DEFAULT_NAME, Box, SandboxError, State
from rig.sandbox.build import claim, locked, phase, say
from rig.sandbox.machine import check_supported, survey


class BoxVerb(Verb):
    """A verb of the sandbox: not begun on a machine that cannot have a box."""

    def invoke(self, ctx: click.Context) -> Any:
        check_supported(platform.system(), platform.machine(), os.geteuid())
        return super().invoke(ctx)


def _verb(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    again = "`make sandbox` goes on from here"
    return sandbox_command.command(name, cls=BoxVerb, interrupted=again, **settings)


@click.group("sandbox")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Which box.")
@click.pass_context
def sandbox_command(context: click.Context, name: str) -> None:
    """The box: a Debian machine that systemd-nspawn boots on this computer, reached over SSH like a real host."""
    context.obj = Box(name)


@_verb("up")
@click.option("--user", "login", help="Who logs in: root, or a user that is made with sudo rights. Default: root.")
@click.pass_obj
def up(box: Box, login: str | None) -> int:
    """Make the box as far as it is not there, and boot it. Quick when it runs."""
    state = box.planned(login=login)
    with locked(box) as lock:
        if boot.is_running(box):
            return already_running(box, state)
        claim(box)
        boot_box(box, state, lock)
    return 0


def already_running(box: Box, state: State) -> int:
    """Exit status for a box that runs: checked, with what differs from what is asked for now."""
    recorded = box.state()
    if recorded.port != state.port:
        raise SandboxError(
            f"box {box.name} runs on port {recorded.port}, not {state.port}; stop it first: `make sandbox-stop`"
        )
    if not boot.answers(recorded) or limits.stored(box) is None:
        finish(box, recorded)
        return 0
    say(box, f"already running: ssh -F {box.ssh_config} {box.name}")
    missing = sorted({str(path) for path in survey().binds} - set(recorded.binds))
    if missing:
        say(
            box,
            f"booted without {', '.join(missing)}, so not visible in it; stop and start it",
        )
    return 0


def boot_box(box: Box, state: State, lock: int) -> None:
    """Build what is missing, then boot."""
    machine = survey()
    if boot.stop(box):
        say(box, "processes left of an earlier start ended")
    if owner := boot.port_owner(state.port):
        raise SandboxError(
            f"port {state.port} on 127.0.0.1 is in use by {owner}; "
            "end that, or set KIMI_RIG_SANDBOX_PORT to a free port"
        )
    build.make(box, machine, state, lock)
    build.make_keys(box)
    build.furnish(box, machine, state)
    binds = tuple(str(path) for path in machine.binds)
    with phase(box, "booted"):
        process = boot.start(box, binds)
        recorded = State(state.port, state.login, process.pid, process.started, binds)
        box.save(recorded)
        boot.wait_ready(box)
    finish(box, recorded)


def finish(box: Box, state: State) -> None:
    """Wait for the end of the boot, tell what failed in it and which limits do not hold."""
    word = boot.wait_ready(box)
    if word == "degraded":
        say(box, f"degraded; failed units: {', '.join(boot.failed_units(box)) or 'none any more'}")
    document = limits.stored(box)
    if document is None:
        with phase(box, "limits probed"):
            document = limits.probe(box, state)
        weak = limits.not_enforced(document)
        say(box, f"limits not enforced in this box: {', '.join(weak) or 'none'}")
    say(box, f"running: ssh -F {box.ssh_config} {box.name}")


@_verb("stop")
@click.pass_obj
def stop(box: Box) -> int:
    """Power the box off."""
    if not box.directory.exists():
        say(box, "there is no such box")
        return 0
    with locked(box):
        begin = time.monotonic()
        stopped = boot.stop(box)
    say(box, f"stopped ({time.monotonic() - begin:.1f} s)" if stopped else "not running")
    return 0


@_verb("rm")
@click.pass_obj
def remove(box: Box) -> int:
    """Power the box off and delete it with all that is in it."""
    if not box.directory.exists() and not box.directory.is_symlink():
        say(box, "there is no such box")
        return 0
    if box.directory.is_symlink() or not box.marker.is_file():
        raise SandboxError(f"{box.directory} is not a box of ours (no {box.marker.name} in it); nothing was deleted")
    with locked(box):
        if boot.stop(box):
            say(box, "stopped")
        with phase(box, "deleted"):
            build.remove_tree(box.root)  # first: a killed removal leaves marker and keys behind
            build.remove_tree(box.directory)
        box.lock.unlink(missing_ok=True)
    if not any(box.base.glob("*/.kimi-rig-box")):
        (box.base / "ssh_config").unlink(missing_ok=True)
        with suppress(OSError):  # not empty: the directory is not only ours
            box.base.rmdir()
    return 0


@_verb("ssh", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def ssh(box: Box, command: Sequence[str]) -> int:
    """Run COMMAND in the box: one word is a shell line, several are an argv, none is a login shell.

    The exit code is the command's own.
    """
    if boot.keeper(box) is None:
        raise SandboxError(f"box {box.name} is not running; start it: `make sandbox`")
    # One word is a line for the shell in the box, several are an argv to be taken as they are.
    line = command[0] if len(command) == 1 else shlex.join(command)
    argv = box.ssh_command(*([line] if line else []))
    sys.stdout.flush()
    os.execvp(argv[0], argv)  # noqa: S606 - becomes ssh: streams, signals and exit status are its own


@_verb("status")
@click.pass_obj
def status(box: Box) -> int:
    """Print state, size and limits; exit code 1 when it does not run."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # status | head
    if not box.marker.is_file():
        say(box, "there is no such box")
        return FAILED
    state = box.state()
    running = boot.is_running(box)
    if running:
        say(box, f"running, pid {state.pid}, port {state.port}, login {state.login}")
        say(box, f"ssh -F {box.ssh_config} {box.name}")
        if failed := boot.failed_units(box):
            say(box, f"failed units: {', '.join(failed)}")
    else:
        say(box, "stopped" if box.stamp.is_file() else "half made; `make sandbox` makes it again")
    say(
        box,
        f"{box.directory}: {size_of(box)} on disk; bound read-only: {', '.join(state.binds) or 'nothing'}",
    )
    if document := limits.stored(box):
        for name, result in document["limits"].items():
            word = {True: "enforced", False: "NOT enforced", None: "unknown"}[result["enforced"]]
            say(box, f"  {name:<24} {word:<13} {result['note']}")
    return 0 if running else FAILED


def size_of(box: Box) -> str:
    command = ["du", "-shx", str(box.directory)]
    done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    return f"{done.stdout.split()[0]}B" if done.stdout else "?"
