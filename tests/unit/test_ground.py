"""Root never reads, follows, changes or deletes by path below what another user can write: a lint, and its proof.

The units' directories belong to the service user (rigctl/guarded.py says why that matters). Whoever needs one takes a
`Place` from a specification; naming the directory, or making a path of a place, is what this lint refuses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rigctl.guarded import Place

CONSTANTS = {"RUNTIME", "SERVING", "LOGS", "CACHE"}
NAMED = re.compile(
    r"/(?:run|var/log|var/cache)/kimi-rig(?:/|$)|/var/lib/kimi-rig/serving|^(?:RUNTIME|LOGS|CACHE)_DIRECTORY$"
)
PLACES = {"runtime", "state", "logs", "cache"}
BEARERS = re.compile(r"(?:^|_)(?:specification|spec|failed|other)$")
"""Names of variables with a specification: other classes have a `state` too."""

RIGCTL = "files/hostkit/rigctl"
EXEMPT = {
    (f"{RIGCTL}/contract/layout.py", "<module>"): "defines the names",
    (f"{RIGCTL}/supervisor/specification.py", "runtime_of"): "makes the Place",
    (f"{RIGCTL}/supervisor/specification.py", "Specification.state"): "makes the Place",
    (f"{RIGCTL}/supervisor/specification.py", "Specification.logs"): "makes the Place",
    (f"{RIGCTL}/supervisor/specification.py", "Specification.cache"): "makes the Place",
    (f"{RIGCTL}/services/status.py", "serving"): "makes the Place",
    (f"{RIGCTL}/supervisor/metrics_file.py", "publish"): "makes the Place, within the unit",
    (
        f"{RIGCTL}/supervisor/serve.py",
        "Supervisor._key_options",
    ): "a word of the engine's command line",
    (f"{RIGCTL}/supervisor/prechecks.py", "disk"): "runs within the unit, as its user; asks for free space alone",
    ("rig/facts/remote_script.py", "<module>"): "lists names only; each is opened as a Place",
    ("rig/bench/variants.py", "profiler"): "a word of the engine's command line",
    ("rig/operations/base_paths.py", "base_paths"): "the directories that hold those of the units are root's",
    ("rig/operations/locks.py", "place_made"): "the directory itself is root's",
    ("rig/operations/removal.py", "state_removed"): "rm -rf enters no link (coreutils removes by descriptor)",
}
"""(file, function): why it may name such a directory."""
PURE = ("rig/artifacts/", "rig/plan/", "rig/host/")
"""Rooms that open nothing: what they name is a word of a unit file, of an order or of a decision."""


def violations(source: str, file: str) -> Iterator[str]:
    """`file:line in function: what` for every access that bypasses rigctl/guarded.py."""
    for line, function, what in faults(source):
        if (file, function) not in EXEMPT and not file.startswith(PURE):
            yield f"{file}:{line} in {function}: {what}"


def faults(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function, what) of every place where a unit's directory is named or made a path."""
    tree = ast.parse(source)
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    expressions = (one for body in bodies if isinstance(body, list) for one in body if isinstance(one, ast.Expr))
    documentation = {id(one.value) for one in expressions}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = node.name if function == "<module>" else f"{function}.{node.name}"
        if (what := _fault(node)) and id(node) not in documentation:
            yield getattr(node, "lineno", 0), function, what
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, "<module>")


def _fault(node: ast.AST) -> str | None:
    path = "makes a path of a place"
    found = None
    match node:
        case ast.Attribute(value=ast.Name(id="layout"), attr=name) if name in CONSTANTS:
            found = f"names layout.{name}"
        case ast.Constant(value=str(text)) if NAMED.search(text):
            found = f"names {text!r}"
        case (
            ast.BinOp(op=ast.Div(), left=value) | ast.Call(func=ast.Name(id="Path" | "str" | "open"), args=[value, *_])
        ):
            found = path if _place(value) else None
        case ast.JoinedStr(values=[ast.FormattedValue(value=value), ast.Constant(value=str(rest)), *_]):
            found = path if _place(value) and rest.startswith("/") else None
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if _place(value) and not hasattr(Place, method):
            found = f"calls {method} of a place"
    return found


def _place(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=bearer) | ast.Attribute(attr=bearer), attr=name) if name in PLACES:
            return (name in ("runtime", "logs", "cache") and bearer != "order") or bool(BEARERS.search(bearer))
        case _:
            return False


# As they stood, each with what it let a compromised engine do.
FAULTS = {
    "sweep: every JSON file below a link's target went": """
CACHE = Path("/var/cache/kimi-rig")
def _finished(name):
    return [*(CACHE / name / "profile").rglob("*.json")]
""",
    "doctor: what a link names came into the archive": """
for path in sorted(specification.logs.glob("*.log"))[-2:]:
    with path.open("rb") as file:
        yield file.read()
""",
    "logs --run: what a link names was printed": """
runs = sorted(specification.logs.glob("*.log"), reverse=True)
""",
    "status: a pipe in its place hung it": """
def started(specification):
    return read_object(specification.runtime / "started.json")
""",
    "fallback: the same": """
end = read_object(failed.state / "ended.json") or {}
""",
    "deploy: a pipe in its place hung it": r"""
started = host.get_fact(Lines, script=f'for f in {layout.RUNTIME}/*/started.json; do tr "\\n" " " < $f; done')
""",
    "facts: the same": """
for path in glob.glob("/run/kimi-rig/*/started.json") + glob.glob("/var/lib/kimi-rig/serving/*/ended.json"):
    open(path)
""",
    "a benchmark's mark": """
def mark(specification):
    return specification.runtime / "measured"
""",
    "a path made of a place": "Path(str(specification.logs), name).unlink()",
    "a path made of its words": 'os.unlink(f"{specification.cache}/x")',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_old_faults_are_seen(fault: str) -> None:
    assert [*violations(FAULTS[fault], "reverted.py")], fault


def test_every_exemption_is_needed() -> None:
    files = {file for file, _ in EXEMPT}
    needed = {(file, function) for file in files for _, function, _ in faults((ROOT / file).read_text())}
    assert not {*EXEMPT} - needed


# Checkpoints lie where the operator wants them, often where others can write. There only `Workplace` changes anything,
# by descriptor, and files are read by rigctl/reached.py.
METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "chmod", "rename", "unlink"}
METHODS |= {"rmdir", "mkdir", "symlink_to", "hardlink_to"}
FUNCTIONS = {"open", "rmtree", "remove_tree", "move", "copy", "copytree"}
HELD = "in the workplace, which is root's alone and held open"
STATE = "in root's state directory"
BY_PATH = {
    ("commands.py", "_forget"): STATE,
    ("commands.py", "_print"): "/dev/null",
    ("http.py", "HttpFetcher._stream"): "a request",
    ("http.py", "HttpFetcher.probe"): "a request",
    ("http.py", "secret_text"): "a credential of systemd's, or root's",
    ("overlay.py", "write"): STATE,
    ("overlay.py", "is_current"): STATE,
    ("host.py", "_hardware"): "the kernel's",
    ("paths.py", "make_parents"): HELD,
    ("paths.py", "remove_tree"): "its callers are in this list",
    ("sink.py", "Sink.__enter__"): HELD,
    ("sink.py", "Sink.restart"): HELD,
    ("sink.py", "Sink.validator"): HELD,
    ("sink.py", "Sink.remember"): HELD,
    ("sink.py", "Sink.finish"): HELD,
    ("sources.py", "Http.listing"): "a request",
    ("staging.py", "Job._generate"): HELD,
    ("workplace.py", "Workplace.begin"): HELD,
    ("workplace.py", "Workplace._proved_before"): HELD,
    ("workplace.py", "Workplace._prune"): HELD,
    ("workplace.py", "Workplace.proved"): HELD,
    ("workplace.py", "Workplace.accept"): HELD,
    ("workplace.py", "Workplace._note"): HELD,
    ("workplace.py", "remove_empty_directories"): HELD,
}
"""(file, function): why it may use a path."""


def by_path(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function, call) of every access by a path; a call that is given a directory's descriptor is none."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = node.name if function == "<module>" else f"{function}.{node.name}"
        if isinstance(node, ast.Call) and not any("dir_fd" in (one.arg or "") for one in node.keywords):
            match node.func:
                case ast.Attribute(attr=name) if name in METHODS or (name == "replace" and len(node.args) == 1):
                    yield node.lineno, function, ast.unparse(node)
                case ast.Name(id=name) | ast.Attribute(attr=name) if name in FUNCTIONS:
                    yield node.lineno, function, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source), "<module>")


def test_checkpoints_are_changed_by_descriptor_and_read_as_foreign_files() -> None:
    room = ROOT / RIGCTL / "checkpoints"
    used, wrong = set(), []
    for path in (*sorted(room.glob("*.py")), room.parent / "page_cache.py", room.parent / "bench" / "host.py"):
        for line, function, call in by_path(path.read_text()):
            used.add((path.name, function))
            wrong += [] if (path.name, function) in BY_PATH else [f"{path.name}:{line} in {function}: {call}"]
    assert not wrong, "\n".join(wrong)
    assert not {*BY_PATH} - used, "not needed any more"


@pytest.mark.parametrize(
    "fault",
    [
        "self.destination.chmod(0o755)",
        "self.destination.rename(self.old)",
        "self.tree.rename(self.destination)",
        "self.root.mkdir(mode=0o700, exist_ok=True)",
        "directory.chmod(0o555 if read_only else 0o755)",
        "(Path(place) / name).chmod(0o444)",
        "remove_tree(self.root)",
        "(self.workplace.tree / entry.path).replace(place)",
        'path.open("rb", buffering=0)',
        'place.read_text(encoding="utf-8")',
    ],
)
def test_the_old_faults_of_staging_are_seen(fault: str) -> None:
    assert [*by_path(fault)]


def sources() -> list[Path]:
    return sorted(path for room in ("rig", "tasks", "files/hostkit/rigctl") for path in (ROOT / room).rglob("*.py"))


def test_nothing_bypasses_the_guarded_access() -> None:
    found = [one for path in sources() for one in violations(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)
