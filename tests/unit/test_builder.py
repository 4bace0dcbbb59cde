"""What others wrote runs as the builder, in a sandbox, and what it leaves is checked before root takes it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rigctl import builder
from rigctl.contract import layout
from rigctl.contract.environment_build import Environment
from rigctl.contract.kernel_job import KernelJob
from rigctl.contract.order import Part
from rigctl.engines import probes
from rigctl.engines.installed import Distribution
from rigctl.errors import RigctlError
from rigctl.kernel import install, steps
from tests.unit.wheelhouse import install as place

RIGCTL = ROOT / "files" / "hostkit" / "rigctl"
SYSTEM: set[str | None] = {
    "systemctl",
    "systemd-run",
    "journalctl",
    "openssl",
    "tail",
    "ldconfig",
    "nm",
    "gcc",
    "g++",
    "dpkg-query",
    "nvidia-smi",
    "rsync",
    "ssh",
}
"""Programs of the distribution, and of the driver's package, that root runs by name."""
LAUNCHERS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
OTHER_WAYS = {
    "system",
    "popen",
    "execv",
    "execve",
    "execvp",
    "execvpe",
    "execl",
    "execlp",
    "posix_spawn",
    "spawnv",
    "fork",
}
EXCEPT = {
    "supervisor/serve.py": "the unit's own main process, of the service user",
    "kernel/compile_job.py": "started by CMake, which the builder runs",
    "services/doctor.py": "a table of the distribution's programs",
}
PENDING = {
    "checkpoints/children.py": "commands of the builder, and the generator of rigctl itself",
    "bench/load.py": "the load generator",
}


def starts(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """Every call that starts a process, with the innermost function around it."""

    def below(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inner = child if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                owner, name = ast.unparse(child.func.value), child.func.attr
                if (owner == "subprocess" and name in LAUNCHERS) or (
                    owner == "os" and (name in OTHER_WAYS or name.startswith(("exec", "spawn")))
                ):
                    yield inner, child
            yield from below(child, inner)

    return below(tree, None)


def programs(tree: ast.Module, call: ast.Call, function: ast.FunctionDef | None) -> set[str | None]:
    """First words of a command that is written out: here, in the function, or by each that calls the function."""
    argument = call.args[0] if call.args else None
    if isinstance(argument, ast.Name) and function is not None:
        if argument.id in [each.arg for each in function.args.args[:1]]:
            calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
            callers = [each for each in calls if ast.unparse(each.func) == function.name]
            return {word for each in callers for word in programs(tree, each, None)} or {None}
        written = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == argument.id
        ]
        argument = written[0] if len(written) == 1 else None
    if isinstance(argument, ast.List) and argument.elts and isinstance(argument.elts[0], ast.Constant):
        return {str(argument.elts[0].value)}
    return {None}


def is_sandboxed(call: ast.Call, function: ast.FunctionDef | None) -> bool:
    """Whether its command is what `builder.sandboxed` gave, or its function refuses root."""
    if function is None:
        return False
    given = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(function)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars is not None and ast.unparse(item.context_expr).startswith("builder.sandboxed(")
    }
    if call.args and ast.unparse(call.args[0]) in given:
        return True
    return any(ast.unparse(node) == "builder.inside()" for node in ast.walk(function) if isinstance(node, ast.Call))


def at_fault(path: Path, text: str) -> list[str]:
    tree = ast.parse(text)
    return [
        f"{path.relative_to(RIGCTL)}:{call.lineno}: {ast.unparse(call)[:80]}"
        for function, call in starts(tree)
        if not is_sandboxed(call, function) and not programs(tree, call, function) <= SYSTEM
    ]


def test_root_starts_nothing_but_programs_of_the_distribution() -> None:
    """Whatever else is started goes through `builder.sandboxed`, or stands in a function that refuses root."""
    found = [
        fault
        for path in sorted(RIGCTL.rglob("*.py"))
        if str(path.relative_to(RIGCTL)) not in {**EXCEPT, **PENDING, "builder.py": ""}
        for fault in at_fault(path, path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess\ndef f(env):\n    subprocess.run([env / 'bin/python', '-c', 'import torch'])\n",
        "import subprocess\ndef f(uv):\n    command = [uv, 'pip']\n    subprocess.Popen(command)\n",
        "import os\ndef f(path):\n    os.execv(path, [])\n",
        "import subprocess\nsubprocess.run(argv)\n",
        "import subprocess\ndef f(argv):\n    subprocess.run(argv)\nf(['nm'])\nf([python])\n",
    ],
)
def test_the_lint_sees(text: str) -> None:
    assert at_fault(RIGCTL / "x.py", text)


def test_only_maintainers_run_without_a_sandbox() -> None:
    users = [
        str(path.relative_to(ROOT))
        for folder in ("rig", "tasks", "files/hostkit")
        for path in (ROOT / folder).rglob("*.py")
        if "unconfined()" in path.read_text() and path.name != "builder.py"
    ]
    assert users == ["rig/maintain/release_add.py"]


# The unit


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with the builder; what systemd is asked for is printed. Its /run."""
    monkeypatch.setattr(builder, "_confined", True)
    monkeypatch.setattr(builder, "user", lambda: builder.User(4711, 4711))
    monkeypatch.setattr(builder, "RUN", tmp_path / "run")
    (tmp_path / "run").mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "${{STATE-inactive}}"\n')
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def properties(command: list[str]) -> list[str]:
    return [word.removeprefix("--property=") for word in command if word.startswith("--property=")]


def test_a_command_gets_the_sandbox_and_only_what_it_was_given(confined: Path) -> None:
    with builder.sandboxed(["/x/python", "-c", "$HOME %h"], unit="a b", writes=[Path("/srv/work")]) as command:
        told = properties(command)
        assert command[: command.index("--")][-1].startswith("--property=EnvironmentFile=")
        assert command[command.index("--") + 1 :] == ["/x/python", "-c", "$$HOME %h"]
    assert "--unit=kimi-job-builder-a-b.service" in command and {"--wait", "--pipe", "--collect"} <= set(command)
    assert set(builder.SANDBOX) <= set(told)
    assert [each for each in told if each.startswith(("ReadWritePaths", "BindPaths"))] == ["ReadWritePaths=/srv/work"]
    assert "PrivateNetwork=yes" in told and "RuntimeMaxSec=86400" in told
    with builder.sandboxed(["x"], unit="a", network="loopback") as command:
        assert {"IPAddressDeny=any", "IPAddressAllow=localhost"} <= set(properties(command))


def test_the_sandbox_is_that_of_a_serving_unit() -> None:
    """Each line of it that the template has, but for what a build needs otherwise."""
    template = (ROOT / "templates" / "kimi.service.j2").read_text()
    wanted = {
        line for line in template.partition("# Sandbox")[2].splitlines() if line[:1].isupper() and "{" not in line
    }
    other = {
        "ProtectHome=yes": "ProtectHome=tmpfs",
        "IPAddressDeny=any": "PrivateNetwork=yes",
        "IPAddressAllow=localhost": "PrivateNetwork=yes",
        "WantedBy=multi-user.target": "KillMode=mixed",
    }
    there = {*builder.SANDBOX, *builder.NETWORKS["none"]}
    assert {other.get(line, line) for line in wanted} <= there


def test_variables_are_no_property_that_others_can_read(confined: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", 'http://user:pa"$s@proxy')
    monkeypatch.setenv("HF_TOKEN", "secret")
    index = {"UV_INDEX_URL": "https://t:k@index"}
    with builder.sandboxed(["x"], unit="a", network="any", environment=index) as command:
        [file] = [Path(word.partition("EnvironmentFile=")[2]) for word in command if "EnvironmentFile=" in word]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        text = file.read_text()
    assert not [word for word in command if "user:" in word or "t:k" in word] and not file.exists()
    assert 'https_proxy="http://user:pa\\"\\$s@proxy"' in text and "secret" not in text
    with builder.sandboxed(["x"], unit="a", environment={}) as command:
        [file] = (confined / "run").glob(".kimi-rig-builder-*")
        assert "proxy" not in file.read_text(), "without a network there is nothing to go through"
        assert ":/usr/sbin:" in file.read_text(), "what looks for the driver asks ldconfig"


def test_a_job_that_ends_takes_its_builder_along(confined: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = confined / "cgroup"
    groups.write_text("1:name=systemd:/system.slice/kimi-job-env-x.service\n")
    assert builder.own_unit(groups) == "kimi-job-env-x.service"
    groups.write_text("0::/user.slice/user-0.slice/session-3.scope\n")
    assert builder.own_unit(groups) is None
    monkeypatch.setattr(builder, "own_unit", lambda: "kimi-job-env-x.service")
    with builder.sandboxed(["x"], unit="a") as command:
        assert {"BindsTo=kimi-job-env-x.service", "After=kimi-job-env-x.service"} <= set(properties(command))


def test_what_still_runs_is_stopped_before_and_after(confined: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE", "active")
    with pytest.raises(ZeroDivisionError), builder.sandboxed(["x"], unit="a"):
        raise ZeroDivisionError
    asked = (confined / "asked").read_text().splitlines()
    assert asked == ["is-active kimi-job-builder-a.service", "stop kimi-job-builder-a.service"] * 2


def test_a_home_is_bound_into_the_sandbox(confined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "FOREIGN_HOMES", (str(tmp_path / "home"),))
    (tmp_path / "link").symlink_to(tmp_path / "home" / "op" / "source")
    with builder.sandboxed(["x"], unit="a", reads=[tmp_path / "link", Path("/srv/source")]) as command:
        assert [each for each in properties(command) if each.startswith("Bind")] == [
            f"BindPaths={tmp_path}/home/op/source"
        ]
    with builder.sandboxed(["x"], unit="a", writes=[Path("/srv/a b")]) as command:
        assert 'ReadWritePaths="/srv/a b"' in properties(command)


def test_without_the_user_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_confined", True)
    monkeypatch.setattr(layout, "BUILDER", "no-such-user-here")
    words = r"system user no-such-user-here does not exist on this host.*deploy"
    with pytest.raises(RigctlError, match=words), builder.sandboxed(["x"], unit="a"):
        pass
    monkeypatch.setattr(layout, "BUILDER", "root")
    with pytest.raises(RigctlError, match="root has the user id 0"):
        builder.user()


@pytest.mark.skipif(os.geteuid() != 0, reason="says something of root alone")
def test_root_is_refused_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    builder.inside()
    monkeypatch.setattr(builder, "_confined", True)
    with pytest.raises(RigctlError, match="root runs nothing that others wrote"):
        builder.inside()


# What passes to root

OTHER = 4711


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the builder's with a small environment in it."""
    if os.geteuid() != 0:
        pytest.skip("giving files to another user takes root")
    monkeypatch.setattr(builder, "user", lambda: builder.User(OTHER, OTHER))
    root = tmp_path / "env"
    (root / "lib" / "deep").mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "lib" / "deep" / "data").write_text("x")
    (root / "bin" / "tool").write_text("x")
    (root / "bin" / "tool").chmod(0o777)
    (root / "bin" / "python").symlink_to("/usr/bin/python3.11")
    (root / "lib64").symlink_to("lib")
    (root / "lib" / "deep" / "up").symlink_to("../../bin/tool")
    theirs(root)
    return root


def theirs(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


def test_what_is_published_is_roots_and_nobody_else_can_write_it(tree: Path) -> None:
    (tree / "lib" / "deep" / "data").chmod(0o600)
    builder.publish(tree)
    for path in (tree, *tree.rglob("*")):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (0, 0)
        assert path.is_symlink() or not status.st_mode & 0o6022, path
    assert stat.S_IMODE((tree / "bin" / "tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "lib" / "deep" / "data").stat().st_mode) == 0o644


def _setuid(tree: Path) -> None:
    (tree / "bin" / "tool").chmod(0o4755)


def _link_out(tree: Path) -> None:
    (tree / "lib" / "deep" / "out").symlink_to("../../../outside")


def _absolute_link(tree: Path) -> None:
    (tree / "lib" / "shadow").symlink_to("/etc/shadow")


def _link_through_a_link(tree: Path) -> None:
    (tree / "lib" / "deep" / "top").symlink_to("../..")
    (tree / "lib" / "deep" / "out").symlink_to("top/../../outside")


def _pipe(tree: Path) -> None:
    os.mkfifo(tree / "lib" / "pipe")


def _device(tree: Path) -> None:
    os.mknod(tree / "lib" / "sda", 0o666 | stat.S_IFBLK, os.makedev(8, 0))


def _another_users_file(tree: Path) -> None:
    (tree / "lib" / "passwd").hardlink_to(tree.parent / "of-root")


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        (_setuid, "bin/tool has the setuid or setgid bit"),
        (_link_out, "deep/out is a symbolic link out of it, to '../../../outside'"),
        (_absolute_link, "shadow is a symbolic link out of it"),
        (_link_through_a_link, "deep/out is a symbolic link out of it"),
        (_pipe, "lib/pipe is neither file, directory nor link"),
        (_device, "lib/sda is neither"),
        (_another_users_file, "lib/passwd belongs to user 0"),
    ],
)
def test_what_a_hostile_build_leaves_is_refused(tree: Path, hostile: Callable[[Path], None], words: str) -> None:
    (tree.parent / "of-root").write_text("x")
    hostile(tree)
    if hostile is not _another_users_file:
        theirs(tree)
    if hostile is _setuid:
        (tree / "bin" / "tool").chmod(0o4755)  # chown took it away
    with pytest.raises(RigctlError, match=words):
        builder.publish(tree)
    assert tree.stat().st_uid == OTHER, "it does not count as root's"
    assert (tree.parent / "of-root").stat().st_uid == 0


@pytest.mark.parametrize("mapped", [False, True])
def test_a_descriptor_that_another_process_was_handed_is_noticed(tree: Path, mapped: bool) -> None:
    """By a socket, to a process of another unit of the builder's; mode and owner do not concern what is open."""
    with (tree / "lib" / "deep" / "data").open("r+b") as held:
        held.write(b"x" * mmap.PAGESIZE)
        held.flush()
        kept = mmap.mmap(os.dup(held.fileno()), mmap.PAGESIZE) if mapped else held
        with pytest.raises(RigctlError, match="deep/data is still open for writing elsewhere"):
            builder.publish(tree)
        assert tree.stat().st_uid == OTHER, "it does not count as root's"
        kept.close()


def test_an_access_list_does_not_outlive_the_publication(tree: Path) -> None:
    path = tree / "lib" / "deep" / "data"
    # Version 2; user::rw-, user:4711:rw-, group::r--, mask::rw-, other::r-- (linux/posix_acl_xattr.h).
    entries = [(1, 6, -1), (2, 6, OTHER), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
    value = (2).to_bytes(4, "little")
    for tag, rights, who in entries:
        value += tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
    try:
        os.setxattr(path, "system.posix_acl_access", value)
    except OSError:
        pytest.skip("this file system has no access lists")
    builder.publish(tree)
    assert "system.posix_acl_access" not in os.listxattr(path)


NAMES = st.sampled_from(["..", ".", "lib", "deep", "top", "bin", "", "up"])


@given(st.lists(NAMES, min_size=1, max_size=6).map("/".join))
def test_a_link_that_passes_stays_inside(target: str) -> None:
    """Whatever other links that pass it goes through: names never lead up, dots only at the start."""
    depth = 2
    if builder._leads_inside(target, depth):
        words = target.split("/")
        assert words.count("..") <= depth and not target.startswith("/")
        assert ".." not in words[words.count("..") :]


def test_what_root_alone_has_used_is_handed_over_once(tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "ccache"
    (old / "a").mkdir(parents=True)
    (old / "a" / "object").write_text("x")
    (tmp_path / "shared-with-root").write_text("x")
    (old / "a" / "second-name").hardlink_to(tmp_path / "shared-with-root")
    assert builder.handed_over(old) == old
    assert {path.lstat().st_uid for path in (old, old / "a", old / "a" / "object")} == {OTHER}
    assert (tmp_path / "shared-with-root").stat().st_uid == 0
    (old / "of-root").write_text("x")
    builder.handed_over(old)
    assert (old / "of-root").stat().st_uid == 0, "what is the builder's already is not walked again"
    os.chown(old, 99, 99)
    with pytest.raises(RigctlError, match="belongs to user 99"):
        builder.handed_over(old)


@pytest.mark.parametrize("how", ["link", "folder", "pipe", "long"])
def test_only_a_plain_file_is_copied(tmp_path: Path, how: str) -> None:
    (tmp_path / "base" / "a").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("secret")
    place = tmp_path / "base" / "a" / "file"
    if how == "link":
        place.symlink_to(tmp_path / "secret" / "file")
    elif how == "folder":
        (tmp_path / "base" / "a").rmdir()
        (tmp_path / "base" / "a").symlink_to(tmp_path / "secret")
    elif how == "pipe":
        os.mkfifo(place)
    else:
        place.write_bytes(bytes(11))
    with pytest.raises(RigctlError, match="it is not used"):
        builder.copied(tmp_path / "base", "a/file", tmp_path / "copy", limit=10)


def test_lines_are_shown_without_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print(os.isatty(0), sys.stdin.read()); sys.exit(3)"
    done = builder.spoken([sys.executable, "-c", code], unit="a")
    assert done == (3, "False") and capfd.readouterr().out == "False \n"


def test_a_program_without_a_sandbox_still_has_a_home_of_its_own() -> None:
    with builder.sandboxed([sys.executable, "-c", "import os; print(os.environ['HOME'])"], unit="a") as command:
        home = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert home != os.environ.get("HOME") and Path(home).is_dir()
    assert not Path(home).exists()


# What the builder answers


class Speaker:
    """A process whose output is given."""

    def __init__(self, text: str) -> None:
        self.stdin, self.stdout = io.StringIO(), io.StringIO(text)

    def wait(self) -> int:
        return 1


def heard(text: str) -> Any:
    said = builder.heard(Speaker(text), "{}", steps.RESULT)  # type: ignore[arg-type]  # all that is used
    return steps._answer(*said, "rig-kernel: build")


def test_the_answer_of_a_step_is_its_last_line() -> None:
    assert heard('[1/2] a.cu\nrigctl-result: {"answer": {"x": 1}}\n') == {"x": 1}
    with pytest.raises(RigctlError, match=r"^git is not installed$"):
        heard('rigctl-result: {"error": "git is not installed"}\n')
    with pytest.raises(RigctlError, match="rig-kernel: build ended with exit code 1 and no answer"):
        heard("killed\n")


def test_a_child_that_talks_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MOST", 1 << 16)
    code = "while True: print('x' * 99)"
    with pytest.raises(RigctlError, match="it has said more than"):
        builder.spoken([sys.executable, "-c", code], unit="a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["answer", "error"]), inner),
    max_leaves=6,
)


@given(st.text() | JSON.map(json.dumps))
def test_whatever_a_builder_answers_is_an_answer_or_a_fault_in_words(reply: str) -> None:
    with contextlib.suppress(RigctlError):
        heard(f"{steps.RESULT}{reply}\n")


@given(JSON)
@pytest.mark.parametrize("model", [steps.Made, steps.Gathered, steps.Held, steps.Looked, steps.Reply, probes.Answer])
def test_whatever_it_says_is_of_the_shape_that_root_uses(model: type[Part], document: Any) -> None:
    with contextlib.suppress(RigctlError):
        model.validated(document, "x")


@pytest.mark.parametrize("name", ["../x.whl", "a/b.whl", "/x.whl", ".x.whl", "x.so", "", "-x.whl"])
def test_a_wheel_is_named_by_a_plain_name(name: str) -> None:
    figures = {"seconds": 1.0, "compiled": 1, "peak_mib": 1, "more": "kept"}
    assert steps.Made.validated({"wheel": "x-1+cu13-cp310-abi3-linux_x86_64.whl", "figures": figures}, "x").figures
    with pytest.raises(RigctlError, match="wheel"):
        steps.Made.validated({"wheel": name, "figures": figures}, "x")


def test_a_package_is_removed_in_its_environment_alone(tmp_path: Path) -> None:
    """A RECORD may say anything: what it names outside stays, and so does all else."""
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    info = site / "evil-1.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "victim").write_text("x")
    (info / "RECORD").write_text("../../../../victim,,\n")
    with pytest.raises(RigctlError, match=r"names ../../../../victim, which is outside"):
        install._removed(tmp_path / "env", site, Distribution("evil", "1", info))
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_package_takes_the_place_of_itself_and_of_no_other(tmp_path: Path, cut_short: bool) -> None:
    job = KernelJob.model_construct(package="kern", engine=Environment.model_construct(path=tmp_path / "env"))
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    place(site, tmp_path / "cache", "kern", "1", {"kern/old.py": "1", "kern/sub/x.py": "1", "../../../bin/kern": "1"})
    place(site, tmp_path / "cache", "other", "1", {"other/x.py": "1"})
    if cut_short:
        (site / "kern-1.dist-info" / "RECORD").unlink()
    place(tmp_path / "new", tmp_path / "cache2", "kern", "2", {"kern/new.py": "2"})
    install._exchange(job, tmp_path / "new")
    assert sorted(path.name for path in site.iterdir()) == ["kern", "kern-2.dist-info", "other", "other-1.dist-info"]
    assert [path.name for path in (site / "kern").iterdir()] == ["new.py"]
    assert (tmp_path / "env" / "bin" / "kern").exists() == cut_short, "nothing names it any more"
    place(tmp_path / "evil", tmp_path / "cache3", "kern", "3", {"kern/x.py": "", "other/x.py": "evil"})
    with pytest.raises(RigctlError, match="other is of another package"):
        install._exchange(job, tmp_path / "evil")
    assert (site / "other" / "x.py").read_text() == "1"
    place(site, tmp_path / "cache4", "one", "1", {"one.py": "1"})
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "one.py").write_text("evil")
    with pytest.raises(RigctlError, match=r"one\.py is of another package"):
        install._exchange(job, tmp_path / "alone")
    install._exchange(job, None)
    assert not list(site.glob("kern*"))
