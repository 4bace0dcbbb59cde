"""Engine environments: one virtual environment a release, built beside the others, whole or not there."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pyinfra import host
from pyinfra.api import operation

from rig.artifacts.engine_inputs import environment_build
from rig.facts.state import JsonFile, Lines
from rig.operations import jobs
from rig.operations.common import Commands, note, notice, refuse, remember, script
from rig.plan.host_plan import Built, Environment, canonical_digest
from rigctl.contract import layout

# In an environment that is complete (rigctl/engines/environment.py).
STAMP = "kimi-rig.json"


@operation()
def environment(env: Built, cache: str, wheels: str | None = None) -> Commands:
    """The environment of one release is complete, and `<ml_env>/<release>/current` points to it.

    It is named by the digest of its inputs, so an existing complete one is right by construction. cache: uv's cache on
    the same file system, which lets environments share their files by hard links. wheels: directory with every wheel.
    """
    base = str(PurePosixPath(env.path).parent)
    proof = f"[ -e {shlex.quote(f'{env.path}/{STAMP}')} ]"
    state = host.get_fact(Lines, script=f"{proof} && echo complete; readlink {shlex.quote(base)}/current")
    if state == ["complete", env.path]:
        host.noop(f"{env.path} is complete")
        return
    if "complete" not in state:
        note(f"{env.path} is built from {env.lock}")
        order = environment_build(env, cache, wheels)
        # A directory that was there before us may hold more than ours.
        whole = [f"[ -e {shlex.quote(path)} ] || {{ {remember('tree', path)}; }}" for path in (base, cache)]
        yield script(*whole, remember("tree", env.path))
        yield from jobs.run(
            jobs.LongJob(
                unit=f"kimi-job-env-{env.name}-{PurePosixPath(env.path).name}",
                argv=[layout.RIGCTL, "environment", "build", json.dumps(order.document())],
                proof=proof,
                writes=[str(PurePosixPath(base).parent)],
                properties=["EnvironmentFile=-/etc/environment"],
            )
        )
    else:
        note(f"{base}/current points to {env.path}")
    yield script(*switch(env.path))


def switch(path: str) -> list[str]:
    """Script lines that let `current` point to an environment, in one step, and note when (for `rigctl prune`)."""
    link = shlex.quote(str(PurePosixPath(path).parent / "current"))
    return [
        f"touch -c {shlex.quote(f'{path}/{STAMP}')}",
        f"ln -sfn {shlex.quote(path)} {link}.new",
        f"mv -fT {link}.new {link}",
    ]


@operation()
def undrifted(environments: Sequence[Built]) -> Commands:
    """No file of an environment has changed since it was proved; nothing is repaired under a running engine.

    One that is yet to be built has nothing to compare. All at once: each takes a core for a second or two.
    """
    lines = host.get_fact(Lines, script=" & ".join([*map(_drift_check, environments), "wait"]))
    drifted = False
    for env in environments:
        start = f"{env.name} drift: "
        findings = [line.removeprefix(start) for line in lines if line.startswith(start)]
        if findings:
            drifted = True
            more = f" and {len(findings) - 3} more" if len(findings) > 3 else ""
            yield from refuse(
                f"{env.path} has drifted: {'; '.join(findings[:3])}{more}. Undo it, and prove it by `rigctl drift "
                f"check --full --env {env.path}`; or stop what runs from there, remove the directory and deploy again"
            )
    if not drifted:
        host.noop(f"{len(environments)} environments are as they were installed")


def _drift_check(env: Built) -> str:
    check = shlex.join([layout.RIGCTL, "drift", "check", "--env", env.path])
    return f"{{ [ ! -e {shlex.quote(f'{env.path}/{STAMP}')} ] || {check} | sed 's/^/{env.name} /'; }}"


@operation()
def accepted(
    env: Environment,
    features: Sequence[str],
    argvs: Sequence[Sequence[str]],
    variables: Mapping[str, Sequence[str]],
) -> Commands:
    """The installed engine has the features that are needed of it, and its own parser takes every command line of ours.

    Asked once for an environment, its command lines and variables; a refusal fails the deploy with the engine's words
    before a unit is written. variables: engine variable -> configurations that set it; one that no file of the engine
    mentions is reported at every deploy.
    """
    digest = canonical_digest([env.path, list(features), argvs, sorted(variables)])[:16]
    proof = f"{layout.PROOFS}/{env.name}-{digest}"
    answer = host.get_fact(JsonFile, path=proof)
    if isinstance(answer, dict):
        _tell_unread(env, answer, variables)
        host.noop(f"{env.name} takes all {len(argvs)} command lines")
        return
    note(f"{env.name} is asked for {len(features)} features and {len(argvs)} command lines")
    probe = [layout.RIGCTL, "probe", "--env", env.path, "--engine", env.release.engine]
    probe += [f"--argv={json.dumps(list(argv))}" for argv in argvs]
    probe += [f"--variable={name}" for name in variables]
    probe += [f"--require={feature}" for feature in features]
    yield script(
        f"mkdir -p {layout.PROOFS}",
        f"timeout -k 10 300 {shlex.join(probe)} > {proof}.new",
        f"rm -f {layout.PROOFS}/{env.name}-????????????????",
        f"mv -f {proof}.new {proof}",
    )
    _tell_unread(env, host.get_fact(JsonFile, path=proof), variables)


def _tell_unread(env: Environment, answer: Any, variables: Mapping[str, Sequence[str]]) -> None:
    for name in answer.get("unread_variables", ()) if isinstance(answer, dict) else ():
        where = ", ".join(variables.get(name, ()))
        notice(f"{name} of {where} is read nowhere in {env.name}: mistyped, or of another version")
