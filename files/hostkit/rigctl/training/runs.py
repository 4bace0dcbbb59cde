"""A training from its first step to its last, as root: which step is next, who has the cards, what serves afterwards.

Steps run as the service user, in the sandbox of `builder`, since they run what others wrote. Root reads of what they
leave only records, by descriptor (`guarded.Place`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rigctl import builder, lock_files
from rigctl.contract import layout
from rigctl.contract.conversations import lines
from rigctl.contract.foreign import one_line
from rigctl.contract.happened import Happened, record_text
from rigctl.contract.training_job import Served, TrainingJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.own_process import own_process
from rigctl.reached import readable
from rigctl.services.switching import switch_to
from rigctl.services.systemd import properties, systemctl
from rigctl.supervisor.specification import Specification, installed, named
from rigctl.training import forecast, step
from rigctl.training.place import Step

CAP_NET_ADMIN = 12
INIT = Path("/proc/1/status")


class Before(Happened):
    """What served when a training took the cards, and is to serve again."""

    FILE = "before.json"

    names: list[str] = []


def state(job: TrainingJob) -> Place:
    """Root's directory for a training."""
    Path(layout.TRAINED, job.name).mkdir(parents=True, exist_ok=True)
    return Place(f"{layout.TRAINED}/{job.name}")


def read_job(name: str) -> TrainingJob:
    """The order of a training of this host. Raises RigctlError."""
    path = Path(layout.training_path(name))
    if not path.exists():
        there = ", ".join(sorted(one.stem for one in path.parent.glob("*.json"))) or "none"
        raise RigctlError(f"there is no training {name} on this host (there are: {there}); name it in its `trainings`")
    return TrainingJob.read(path)


# Steps


def parts_of(job: TrainingJob) -> int:
    """Into how many parts states are divided: known once there are answers."""
    return plan(job).parts


def steps(job: TrainingJob, parts: int) -> Iterator[Step]:
    """Every step, in order. With several parts extraction and training take turns."""
    rungs = [*job.trained_rungs()]
    yield Step("answers")
    yield from (Step("prepare", rung) for rung in rungs)  # all its parts at once
    if parts == 1:
        # The largest first: the others find their states there, and the engine is loaded once.
        yield from (Step("states", rung) for rung in reversed(rungs))
    for rung in job.ladder:
        for part in range(parts if rung else 1):
            if parts > 1 and rung:
                yield Step("states", rung, part)
            yield Step("train", rung, part)
        yield Step("export", rung)
    yield Step("evaluate")


def plan(job: TrainingJob) -> forecast.Forecast:
    """What the training takes, by this host's own figures where it has them. Raises OSError for unreadable prompts."""
    records = Place(job.directory)
    answered = step.known(records, Step("answers"))
    extracted = step.known(records, Step("states", job.ladder[-1]))
    measured = forecast.Measured(
        a_row=answered.tokens / answered.rows if answered and answered.done and answered.rows else None,
        rate=extracted.rate if extracted and extracted.done else None,
        there=extracted.tokens * job.bytes_a_token if extracted and extracted.done else 0,
    )
    found = forecast.forecast(job, sum(_rows(one.path) for one in job.prompts), _free(job.root), measured)
    return replace(found, refused=(*found.refused, *_networks()))


def _networks() -> Iterator[str]:
    """Steps and engines are alone in networks of their own, whose loopback systemd brings up (capabilities(7))."""
    found = re.search(r"^CapBnd:\s*(\w+)$", INIT.read_text(), re.MULTILINE)
    if found and not int(found[1], 16) >> CAP_NET_ADMIN & 1:
        yield (
            "systemd of this machine lacks CAP_NET_ADMIN, so that a unit with a network of its own has no loopback: a "
            "box gets it by `KIMI_RIG_SANDBOX_NETWORKS=1 make sandbox`"
        )


def _free(root: str) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def _rows(path: str) -> int:
    with readable(Path(path)) as file:
        return sum(bool(line.strip()) for line in lines(file, Path(path)))


# Who has the cards


def rivals(job: TrainingJob) -> list[Specification]:
    """Serving configurations that cannot run beside the trainer: on the same cards, or on the processor too."""
    cards = set(job.trainer.gpus)
    return [one for one in installed() if (cards & set(one.gpus) if cards else not one.gpus)]


def active(one: Specification) -> bool:
    return properties(one.unit, ["ActiveState"])["ActiveState"] in ("active", "activating", "reloading")


def remember_before(job: TrainingJob) -> None:
    """What serves now is started again at the end; what an interrupted run has noted stays noted."""
    place = state(job)
    own = {job.states.served.name}
    names = [one.name for one in rivals(job) if active(one) and one.name not in own]
    known = Before.known(place)
    place.write(Before.FILE, record_text({"names": list(dict.fromkeys([*(known.names if known else []), *names]))}))


def give_back(job: TrainingJob, *, wait: bool) -> None:
    """What served before serves again; what was started for the training alone is stopped."""
    place = state(job)
    before = Before.known(place)
    names = before.names if before else []
    for name in dict.fromkeys([job.states.served.name, job.answers.served.name]):
        if name not in names:
            with suppress(RigctlError):
                systemctl("stop", *([] if wait else ["--no-block"]), layout.unit_name(name))
    for name in names:
        if wait:
            switch_to(named(name))
        else:
            systemctl("start", "--no-block", layout.unit_name(name))
    place.remove(Before.FILE)


# Running


def run(job: TrainingJob, *, again: str | None = None) -> None:
    """Every step that is not done. again: a stage that is done anew. Raises RigctlError with the step's own words."""
    lock = Path(layout.TRAINED) / ".lock"
    with lock_files.locked(lock, "another training is at work: one at a time has the cards", 0):
        said = plan(job)
        if said.refused:
            raise RigctlError("; ".join(said.refused))
        remember_before(job)
        try:
            for one in _all(job):
                parts = parts_of(job) if one.stage != "answers" else 1
                if one.stage != again and step.is_done(job, one, parts):
                    continue
                _provide(job, one)
                _step(job, one, parts, again=one.stage == again)
        except BaseException:
            give_back(job, wait=False)
            raise
        give_back(job, wait=True)


def _all(job: TrainingJob) -> Iterator[Step]:
    """The steps; into how many parts is decided when there are answers."""
    yield Step("answers")
    yield from (one for one in steps(job, parts_of(job)) if one.stage != "answers")


def _asked(job: TrainingJob, one: Step) -> Served | None:
    """The engine that a step asks."""
    return {"answers": job.answers.served, "states": job.states.served}.get(one.stage)


def _provide(job: TrainingJob, one: Step) -> None:
    if served := _asked(job, one):
        specification = named(served.name)
        if specification.api_key:
            raise RigctlError(f"{served.name} asks for a key: let an entry with `listen: {{private: true}}` extend it")
        switch_to(specification)


def _step(job: TrainingJob, one: Step, parts: int, *, again: bool) -> None:
    """Run a step as the service user; its lines are shown."""
    words, served = [str(one), str(parts), *([step.AGAIN] if again else [])], _asked(job, one)
    code, last = builder.spoken(
        own_process("rigctl.training.step", *words),
        json.dumps(job.document()),
        unit=f"train-{job.name}",
        writes=[Path(job.directory), Path(job.states.staging)],
        # An engine that is not private listens on the machine's own loopback.
        network="loopback" if served and not served.private else "none",
        environment={"HOME": f"{job.directory}/cache", "TMPDIR": "/tmp"},  # noqa: S108  # the unit's own
        properties=[f"User={job.user}", f"Group={job.user}", "UMask=0027", *_claims(job, one)],
    )
    if code != 0 or not step.is_done(job, one, parts):
        raise RigctlError(f"{one}: {_why(job, one, code, last)}; `rigctl train start {job.name}` goes on")


def _claims(job: TrainingJob, one: Step) -> list[str]:
    """Whose network it joins; for a step that needs the cards itself, what cannot run beside it."""
    if served := _asked(job, one):
        return [f"JoinsNamespaceOf={layout.unit_name(served.name)}"] if served.private else []
    if one.stage in ("train", "evaluate"):
        units = " ".join(rival.unit for rival in rivals(job))
        return [f"Conflicts={units}", f"After={units}"] if units else []
    return []


def _why(job: TrainingJob, one: Step, code: int, last: str) -> str:
    """Why a step ended before it was done."""
    taken = [rival.name for rival in rivals(job) if one.stage in ("train", "evaluate") and active(rival)]
    if taken:
        return f"{', '.join(taken)} was started and took the cards"
    if (served := _asked(job, one)) and not active(named(served.name)):
        return f"{served.name} has ended (`rigctl logs {served.name}` says why)"
    return f"ended with exit code {code}: {one_line(last, 400) or 'it said nothing'}"
