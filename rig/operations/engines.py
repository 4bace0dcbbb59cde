"""Engine environments: one virtual environment a release, built beside the others, whole or not there."""

from __future__ import annotations

import json
import shlex
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import operation

from rig import layout
from rig.facts.state import Lines
from rig.hostplan import Environment
from rig.operations import jobs
from rig.operations.common import Commands, note, remember, script

STAMP = "kimi-rig.json"


@operation()
def environment(env: Environment, cache: str) -> Commands:
    """The environment of one release is complete, and `<ml_env>/<release>/current` points to it.

    It is named by the digest of its inputs, so an existing complete one is right by construction. cache: uv's cache on
    the same file system, which lets environments share their files by hard links.
    """
    base = str(PurePosixPath(env.path).parent)
    proof = f"[ -e {shlex.quote(f'{env.path}/{STAMP}')} ]"
    state = host.get_fact(Lines, script=f"{proof} && echo complete; readlink {shlex.quote(base)}/current")
    if state == ["complete", env.path]:
        host.noop(f"{env.path} is complete")
        return
    if "complete" not in state:
        note(f"{env.path} is built from {env.lock}")
        specification = {
            "path": env.path,
            "python": env.python,
            "lock": env.lock_on_host,
            "cache": cache,
            "index": env.release.index.model_dump() if env.release.index else None,
        }
        yield script(remember("directory", base))
        yield from jobs.run(
            jobs.LongJob(
                unit=f"kimi-job-env-{env.name}-{PurePosixPath(env.path).name}",
                argv=[layout.RIGCTL, "environment", "build", json.dumps(specification)],
                proof=proof,
                properties=["EnvironmentFile=-/etc/environment"],
            )
        )
    else:
        note(f"{base}/current points to {env.path}")
    current = shlex.quote(f"{base}/current")
    yield script(f"ln -sfn {shlex.quote(env.path)} {current}.new", f"mv -fT {current}.new {current}")
