"""Model and drafters on the host: complete, or not there."""

from __future__ import annotations

import hashlib
import shlex
from functools import cache

from pyinfra import host
from pyinfra.api import operation

from rig import layout
from rig.catalog import Checkpoint, GeneratorSource, HubSource
from rig.facts.state import Lines
from rig.operations import jobs
from rig.operations.common import Commands, note, refuse, remember, script
from rig.operations.hostkit import SOURCE

RECORDS = f"{layout.STATE}/checkpoints"


@operation()
def checkpoint(checkpoint_name: str, entry: Checkpoint, path: str) -> Commands:
    """The checkpoint lies complete at `path`. What the operator put there is taken as it is and never changed."""
    name, quoted = checkpoint_name, shlex.quote(path)
    if not isinstance(entry.source, GeneratorSource):
        yield from _already_there(name, entry, path)
        return
    wanted = generator_digest()
    proof = f"grep -qsF {wanted} {RECORDS}/{name}.json && [ -e {quoted}/config.json ]"
    if host.get_fact(Lines, script=f"{proof} && echo complete"):
        host.noop(f"{path} is complete")
        return
    note(f"{path} is generated ({entry.source.generator})")
    record = f'{{"path": "{path}", "generator": "{entry.source.generator}", "digest": "{wanted}"}}'
    publish = f"printf '%s\\n' {shlex.quote(record)} > {RECORDS}/{name}.json"
    make = f"{layout.RIGCTL} tiny-kimi {shlex.quote(entry.source.generator)} {quoted}"
    # What lies there with a record of ours is an older or half-recorded product of the generator.
    ours = f"[ ! -e {RECORDS}/{name}.json ] || rm -rf {quoted}"
    yield script(remember("directory", path), f"mkdir -p {RECORDS} $(dirname {quoted})", ours)
    yield from jobs.run(
        jobs.LongJob(
            unit=f"kimi-job-checkpoint-{name}-{wanted[:12]}",
            argv=["sh", "-c", f"{make} && {publish}"],
            proof=proof,
            limit_seconds=600,
        )
    )


@cache
def generator_digest() -> str:
    """sha256 over the generator's source: another generator makes other checkpoints."""
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "rigctl").glob("tiny_kimi*/**/*.py")) + sorted(
        (SOURCE / "rigctl").glob("tiny_kimi*.py")
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _already_there(name: str, entry: Checkpoint, path: str) -> Commands:
    if host.get_fact(Lines, script=f"[ -e {shlex.quote(path)}/config.json ] && echo there"):
        host.noop(f"{path} is there")
        return
    source = entry.source
    where = f"from {source.repository}" if isinstance(source, HubSource) else "there by hand"
    pinned = " (no revision is pinned)" if isinstance(source, HubSource) and source.revision is None else ""
    yield from refuse(f"checkpoint {name} is not at {path}: put it {where}{pinned} and deploy again")
