"""A training on its host: the order of steps, who has the cards meanwhile, what serves afterwards however it ends."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rigctl.contract import layout
from rigctl.contract.conversations import LONGEST_LINE
from rigctl.contract.training_job import STAGES, TrainingJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.supervisor import specification
from rigctl.training import commands, runs, step
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Progress, Progressed

SERVED = {"model": "m", "private": True, "engine": "vllm", "version": "0.33.0", "url": "http://127.0.0.1:8000"}
SPEED = {
    "engine": "vllm",
    "version": "0.33.0",
    "release": "r",
    "url": "http://127.0.0.1:8000",
    "model": "m",
    "steps": 3,
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    monkeypatch.setattr(layout, "TRAINED", str(tmp_path / "state"))
    monkeypatch.setattr(runs, "INIT", tmp_path / "init")
    (tmp_path / "init").write_text("Name:\tsystemd\nCapBnd:\t000001ffffffffff\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": []}\n' * 100)
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    content: dict[str, Any] = {
        **{"name": "tiny", "user": "kimi", "root": str(tmp_path / "data"), "target": "t", "target_path": "/t"},
        **{
            "hidden": 8,
            "layers": 7,
            "vocabulary": 16,
            "held_out": 0.1,
            "ladder": [0, 10],
            "tokens_a_row": 5,
            "rate": 9.0,
        },
        **{"publish": "p", "publish_path": "/drafters/p"},
        "prompts": [{"path": str(prompts), "sha256": "a" * 64, "domain": "d", "licence": "l", "provenance": "p"}],
        "answers": {"served": {**SERVED, "name": "answering"}, "max_tokens": 9},
        "states": {
            "served": {**SERVED, "name": "extracting"},
            **{"layer_ids": [2, 7], "staging": str(tmp_path / "data/staging"), "disk_limit": 10**6},
        },
        "recipe": {"epochs": 1, "learning_rate": 1.0, "draft_vocabulary": 4, "sequence_length": 64},
        "trainer": {"environment_path": "/e", "version": "0.9.0", "lock_sha256": "b" * 64, "gpus": [0, 1]},
        "evaluation": {"engines": [{**SPEED, "name": "base", "base": ["x"], "drafting": ["x"]}]},
        "format": TrainingJob.FORMAT,
    }
    return TrainingJob.parse(content, "x")


@dataclass
class Unit:
    name: str
    gpus: list[int] = field(default_factory=lambda: [0, 1])
    api_key: bool = False

    @property
    def unit(self) -> str:
        return layout.unit_name(self.name)


@dataclass
class Host:
    """Serving units of a host, of which one on the same cards runs at a time."""

    units: list[Unit]
    running: set[str]
    steps: list[str] = field(default_factory=list)
    fails: str = ""

    def start(self, unit: Unit) -> int:
        cards = {one.name for one in self.units if set(one.gpus) & set(unit.gpus)}
        self.running = (self.running - cards) | {unit.name}
        return 0

    def systemctl(self, verb: str, *words: str) -> str:
        name = words[-1].removeprefix("kimi-").removesuffix(".service")
        if verb == "stop":
            self.running.discard(name)
        else:
            self.start(self.named(name))
        return ""

    def named(self, name: str) -> Unit:
        return next(one for one in self.units if one.name == name)

    def step(self, job: TrainingJob, one: Step, parts: int, *, again: bool) -> None:
        if one.stage in ("train", "evaluate"):  # its unit's Conflicts=
            self.running = {
                unit.name for unit in self.units if unit.name in self.running and not set(unit.gpus) & {0, 1}
            }
        needs = {"answers": "answering", "states": "extracting"}.get(one.stage)
        assert needs is None or needs in self.running
        if one.stage == self.fails:
            raise RigctlError(f"{one} failed")
        self.steps.append(one.stage)
        step.run(job, one, parts, again=again)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host([Unit("answering"), Unit("extracting"), Unit("serving"), Unit("beside", [5])], {"serving", "beside"})
    monkeypatch.setattr(runs, "installed", lambda: found.units)
    monkeypatch.setattr(runs, "named", found.named)
    monkeypatch.setattr(runs, "switch_to", found.start)
    monkeypatch.setattr(runs, "systemctl", found.systemctl)
    monkeypatch.setattr(runs, "active", lambda one: one.name in found.running)
    monkeypatch.setattr(runs, "_step", found.step)
    for stage in STAGES:
        module = types.ModuleType(f"rigctl.training.{stage}")
        module.run = did  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def did(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    folder = next(iter(step.made(place)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "did").write_text((folder / "did").read_text() + "x" if (folder / "did").exists() else "x")
    progress.tell(rows_done=10, tokens=50)


def test_every_step_is_done_once_and_what_served_serves_again(job: TrainingJob, host: Host) -> None:
    runs.run(job)
    assert host.steps == ["answers", "prepare", "states", "train", "export", "train", "export", "evaluate"]
    assert host.running == {"serving", "beside"}
    host.steps.clear()
    runs.run(job)
    assert (host.steps, host.running) == ([], {"serving", "beside"})
    runs.run(job, again="evaluate")
    assert host.steps == ["evaluate"]


def test_a_machine_without_networks_of_units_is_refused_before_anything_starts(
    job: TrainingJob, host: Host, tmp_path: Path
) -> None:
    (tmp_path / "init").write_text("Name:\tsystemd\nCapBnd:\t00000000fdecafff\n")  # what systemd-nspawn leaves
    with pytest.raises(RigctlError, match="KIMI_RIG_SANDBOX_NETWORKS=1 make sandbox"):
        runs.run(job)
    assert (host.steps, host.running) == ([], {"serving", "beside"})


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_stage_gives_the_cards_back_and_the_next_run_goes_on(job: TrainingJob, host: Host, stage: str) -> None:
    host.fails = stage
    with pytest.raises(RigctlError, match="failed"):
        runs.run(job)
    assert host.running == {"serving", "beside"}
    assert runs.Before.known(runs.state(job)) is None
    host.fails = ""
    runs.run(job)
    whole = ["answers", "prepare", "states", "train", "export", "train", "export", "evaluate"]
    assert sorted(host.steps) == sorted(whole)


def test_what_served_before_a_run_that_was_killed_serves_after_the_next(job: TrainingJob, host: Host) -> None:
    runs.remember_before(job)
    host.running = {"extracting", "beside"}  # killed there, and the machine went down before its unit's ExecStopPost
    runs.run(job)
    assert host.running == {"serving", "beside"}


def test_the_unit_of_a_killed_run_gives_back(job: TrainingJob, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.remember_before(job)
    host.running = {"extracting", "beside"}
    assert commands.after(job, commands.argparse.Namespace()) == 0
    assert host.running == {"serving", "beside"}
    host.running = {"beside"}
    commands.after(job, commands.argparse.Namespace())
    assert host.running == {"beside"}


def test_an_engine_that_asks_for_a_key_is_not_asked(job: TrainingJob, host: Host) -> None:
    host.named("answering").api_key = True
    with pytest.raises(RigctlError, match="answering asks for a key"):
        runs.run(job)
    assert host.running == {"serving", "beside"}


def test_what_does_not_fit_is_refused_before_anything_is_touched(job: TrainingJob, host: Host) -> None:
    whole = job.document()
    with pytest.raises(RigctlError, match="the ladder wants 1,000 conversations"):
        runs.run(TrainingJob.parse({**whole, "ladder": [1000]}, "x"))
    assert (host.running, host.steps) == ({"serving", "beside"}, [])


def test_another_recipe_makes_anew_what_depends_on_it(job: TrainingJob, host: Host) -> None:
    runs.run(job)
    host.steps.clear()
    whole = job.document()
    runs.run(TrainingJob.parse({**whole, "recipe": {**whole["recipe"], "epochs": 2}}, "x"))
    assert host.steps == ["train", "export", "train", "export", "evaluate"]
    assert {path.read_text() for path in Path(job.directory).glob("checkpoints/*/*/did")} == {"x"}, "made anew"


def test_states_that_do_not_fit_at_once_take_turns_with_the_trainer(job: TrainingJob, host: Host) -> None:
    whole = job.document()
    # 50 tokens of 32 bytes were answered to 10 conversations.
    small = TrainingJob.parse({**whole, "states": {**whole["states"], "disk_limit": 2048}, "tokens_a_row": 10}, "x")
    whole_rows = TrainingJob.parse({**small.document(), "ladder": [80]}, "x")
    runs.run(whole_rows)
    assert host.steps.count("states") == host.steps.count("train") == runs.parts_of(whole_rows) == 7
    assert [stage for stage in host.steps if stage in ("states", "train")][:4] == ["states", "train", "states", "train"]
    assert not [*Path(job.directory).glob("states/80/*/did")], "states of a part stay after it is trained on"


def test_a_configuration_whose_name_begins_as_a_unit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kimi-states", "states", "plain")
    monkeypatch.setattr(specification, "_files", lambda: [tmp_path / f"{name}.json" for name in names])
    monkeypatch.setattr(specification.Specification, "read", classmethod(lambda _, path: path.stem))
    for asked, found in {
        **{"kimi-states": "kimi-states", "kimi-kimi-states.service": "kimi-states", "states": "states"},
        **{"plain": "plain", "kimi-plain.service": "plain"},
    }.items():
        assert str(specification.named(asked)) == found


NUMBERS = st.sampled_from([10**400, -1, 10**18, 2**63, 1e308, -5.5, 0]) | st.integers() | st.floats() | st.none()
RECORDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("ladder", "rows", "tokens", "seconds", "rate", "loss", "at", "rows_done", "disk"), NUMBERS),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(RECORDS, st.booleans())
def test_whatever_figures_the_service_user_leaves_root_can_say_them(
    job: TrainingJob, told: dict[str, Any], done: bool
) -> None:
    place = Place(job.directory)
    for one in (Step("answers"), Step("states", 10)):
        record = {"digest": step.digest(job, one, 1), "done": done, **told}
        place.write(step.file_of(one), json.dumps(record).encode())
    place.write(Progressed.FILE, json.dumps({"step": "states-10-0", **told}).encode())
    assert 1 <= runs.plan(job).parts <= 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "_active", lambda _: True)
        for form in (True, False):
            assert commands.status(job, commands.argparse.Namespace(json=form)) == 0


def test_prompts_that_are_a_pipe_or_endless_are_refused(job: TrainingJob) -> None:
    path = Path(job.prompts[0].path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no regular file"):
        runs.plan(job)
    path.unlink()
    path.write_bytes(b"x" * (LONGEST_LINE + 2))
    with pytest.raises(RigctlError, match="not one conversation"):
        runs.plan(job)
