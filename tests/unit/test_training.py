"""Training of drafters: what is said before, which step comes next, what a catalogue may say, what is published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.artifacts.published import Receipt, checkpoint_block, serving_blocks, with_block
from rig.artifacts.training_orders import training_job
from rig.artifacts.units import unit_file
from rig.catalog.entries import ROOT, forget_catalogs, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import HostSettings
from rig.plan import host_plan as plans
from rig.plan.host_plan import HostPlan, host_plan
from rig.plan.training_page import trainings_text
from rigctl.contract.order import ContractError
from rigctl.contract.training_job import TrainingJob
from rigctl.guarded import Place
from rigctl.training import forecast, runs, step
from rigctl.training.place import Step
from tests.support.plans import data

NAME = "tiny-drafter"


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped catalogues, with prompts of our own."""
    copy = tmp_path_factory.mktemp("inventory") / "inventory"
    shutil.copytree(ROOT / "inventory", copy)
    prompts = copy / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 10)
    text = (copy / "training.yaml").read_text()
    for name in ("chat", "reasoning", "code", "tools"):
        text = text.replace(f"files/prompts/{name}.jsonl", str(prompts))
    (copy / "training.yaml").write_text(text)
    return copy


@pytest.fixture(scope="module")
def plan(inventory: Path) -> HostPlan:
    return made(inventory)


def made(inventory: Path, **more: Any) -> HostPlan:
    said = {"catalogue_overlay": "sandbox-training.yaml", "configurations": ["vllm-base"], "trainings": [NAME], **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "load_catalog", lambda overlay: load_catalog(overlay, inventory))
        return host_plan(data("sandbox", **said), "debian-12", HostSettings())


@pytest.fixture(scope="module")
def job(plan: HostPlan) -> TrainingJob:
    return training_job(plan, NAME)


def changed(job: TrainingJob, **parts: Any) -> TrainingJob:
    return TrainingJob.parse({**job.document(), **parts}, "x")


def test_a_host_gets_what_its_training_needs_and_no_other_host_does(plan: HostPlan, inventory: Path) -> None:
    assert {"vllm-base", "kimi-k2.5-answers", "kimi-k2.5-states"} == plan.serving.keys()
    assert "speculators-cpu-0.9.0" in plan.built and "speculators-cpu-0.9.0" not in plan.environments
    other = made(inventory, trainings=[])
    assert other.serving.keys() == {"vllm-base"} and not other.trainers
    with pytest.raises(CatalogError, match=r"trainings: no-such is not in training\.yaml"):
        made(inventory, trainings=["no-such"])


def test_its_page_says_what_it_makes_and_claims(plan: HostPlan, inventory: Path) -> None:
    text = trainings_text(plan)
    assert f"{NAME} = tiny-drafter, from an untrained drafter, for kimi-k2.5-int4" in text
    assert "claims the processor: what serves there stops meanwhile" in text
    assert "40 conversations, about 9,200 tokens (training.yaml)" in text
    assert "states: 0.02 GB (2,048 bytes a token)" in text
    assert f"{inventory / 'prompts.jsonl'} (Apache-2.0, kimi-rig)" in text
    assert trainings_text(made(inventory, trainings=[])) == ""


def test_the_extraction_is_alone_in_its_network(plan: HostPlan) -> None:
    unit = unit_file(plan, "kimi-k2.5-states")
    assert "PrivateNetwork=yes" in unit
    assert "ReadWritePaths=/data/training/staging/kimi-k2.5-int4" in unit
    assert "PrivateNetwork" not in unit_file(plan, "vllm-base")


def test_answers_of_an_engine_that_asks_for_a_key_are_refused(inventory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "inventory"
    shutil.copytree(inventory, copy)
    text = (copy / "serving.yaml").read_text()
    private = "description: answers for a training\n  listen: {private: true}\n"
    assert private in text
    made(copy, api_key_file="~/key")
    (copy / "serving.yaml").write_text(text.replace(private, "description: answers\n"))
    forget_catalogs()
    with pytest.raises(CatalogError, match=r"training\.tiny-drafter\.answers: kimi-k2\.5-answers asks for a key here"):
        made(copy, api_key_file="~/key")


WRONG = [
    (
        "target: kimi-k2.5-int4\n",
        "target: kimi\n",
        "no target kimi",
    ),
    ("trainer: speculators-cpu-0.9.0", "trainer: vllm-0.33.0", "no release of kind trainer vllm-0.33.0"),
    ("gpus: []", "gpus: [0]", "speculators-cpu-0.9.0 runs on cpu"),
    ("{configuration: kimi-k2.5-states, disk", "{configuration: vllm-base, disk", "states need extract_hidden_states"),
    ("configuration: kimi-k2.5-answers", "configuration: vllm-base", "vllm-base has no served_model_name"),
    ("configurations: [vllm-base]", "configurations: [vllm-eagle3-custom]", "speculates: name one without"),
    ("publish: tiny-drafter", "publish: aq-medai-k2-drafter", "there is a checkpoint aq-medai-k2-drafter already"),
    ("ladder: [0, 40]", "lader: [0, 40]", 'did you mean "ladder"'),
]


@pytest.mark.parametrize(("right", "wrong", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_a_wrong_entry_is_refused_by_file_and_line(
    inventory: Path, tmp_path: Path, right: str, wrong: str, says: str
) -> None:
    copy = tmp_path / "inventory"
    shutil.copytree(inventory, copy)
    head, _, tail = (copy / "training.yaml").read_text().partition("\ntiny-drafter:")
    assert right in tail
    (copy / "training.yaml").write_text(f"{head}\ntiny-drafter:{tail.replace(right, wrong, 1)}")
    with pytest.raises(CatalogError, match=r"inventory/training.yaml:\d+: training.tiny-drafter") as caught:
        load_catalog(None, copy)
    assert says in str(caught.value)


def test_the_bytes_of_a_token_are_those_of_the_real_model(job: TrainingJob) -> None:
    real = changed(job, hidden=7168, layers=61, states={**job.document()["states"], "layer_ids": [2, 30, 58, 61]})
    assert real.bytes_a_token == 57_344
    said = forecast.forecast(
        changed(real, ladder=[10_000], tokens_a_row=1444, rate=3165.0, states=limited(real, 10**12)),
        11_200,
        2 * 10**12,
        forecast.Measured(),
    )
    assert (said.bytes, said.parts, said.refused) == (10_000 * 1444 * 57_344, 1, ())
    assert said.hours == pytest.approx(76 / 60, rel=0.01)


def limited(job: TrainingJob, limit: int) -> dict[str, Any]:
    return {**job.document()["states"], "disk_limit": limit}


@given(
    rows=st.integers(0, 10**6),
    free=st.integers(0, 10**13),
    limit=st.integers(1, 10**13),
    share=st.none() | st.floats(0.001, 1),
)
def test_what_is_not_refused_fits(plan: HostPlan, rows: int, free: int, limit: int, share: float | None) -> None:
    """share: of the longest row that `prepare-data` leaves, in the mean of those measured."""
    job = training_job(plan, NAME)
    job = changed(job, states=limited(job, limit))
    a_row = share and share * job.recipe.sequence_length
    said = forecast.forecast(job, rows, free, forecast.Measured(a_row=a_row))
    if not said.refused:
        assert said.rows == job.ladder[-1]
        assert said.bytes <= said.parts * job.states.disk_limit
        assert said.bytes / said.parts <= free
    assert all(isinstance(line, str) for line in said.lines(job))


def test_with_room_for_all_the_engine_is_loaded_once_and_else_they_take_turns(job: TrainingJob) -> None:
    long = changed(job, ladder=[0, 10, 20])
    assert [str(one) for one in runs.steps(long, 1)] == [
        *("answers-0-0", "prepare-10-0", "prepare-20-0", "states-20-0", "states-10-0", "train-0-0", "export-0-0"),
        *("train-10-0", "export-10-0", "train-20-0", "export-20-0", "evaluate-0-0"),
    ]
    turns = [str(one) for one in runs.steps(changed(job, ladder=[10]), 2)]
    assert turns[2:6] == ["states-10-0", "train-10-0", "states-10-1", "train-10-1"]


def test_another_recipe_trains_anew_and_keeps_answers_and_states(job: TrainingJob) -> None:
    other = changed(job, recipe={**job.document()["recipe"], "learning_rate": 0.5})
    longer = changed(job, ladder=[0, 60])
    for one in runs.steps(job, 1):
        same = step.digest(job, one) == step.digest(other, one)
        assert same == (one.stage in ("answers", "prepare", "states")), one
        assert step.digest(job, one) == step.digest(longer, one) or one.stage == "evaluate"
    assert step.digest(job, Step("train", 40), 1) != step.digest(job, Step("train", 40), 2)


@given(content=st.binary(max_size=60) | st.sampled_from([b'{"digest": 1}', b'{"digest": "a", "rows": -1.5}', b"[]"]))
def test_a_record_that_is_none_is_no_step_that_is_done(
    job: TrainingJob, tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    place = tmp_path_factory.mktemp("place")
    (place / "step-train-40-0.json").write_bytes(content)
    found = step.known(Place(str(place)), Step("train", 40))
    assert found is None or not found.done


def test_an_order_whose_values_do_not_agree_is_refused(job: TrainingJob) -> None:
    with pytest.raises(ContractError, match="ladder: numbers that rise"):
        changed(job, ladder=[10, 5])
    with pytest.raises(ContractError, match="the last one is 7, the number of layers"):
        changed(job, states={**job.document()["states"], "layer_ids": [2, 3]})
    assert TrainingJob.parse_text(job.text(), "x") == job


def test_published_entries_are_read_by_the_catalogue_and_written_once(plan: HostPlan, inventory: Path) -> None:
    entry = plan.trainings[NAME]
    receipt = Receipt.of(
        '{"name": "tiny-drafter", "training": {"target": "kimi-k2.5-int4", "convention": "input", "layer_ids": [2]},'
        ' "provenance": {"engine": "vllm", "samples": 54}, "files": {"config.json": "%s"}, "length": 3.8,'
        ' "length_before": 1.0, "more": {"kept": 1}}' % ("a" * 64),
        "x",
    )
    text = (inventory / "checkpoints.yaml").read_text()
    once = with_block(text, NAME, checkpoint_block(receipt, entry))
    assert with_block(once, NAME, checkpoint_block(receipt, entry)) == once
    below = with_block(f"{once}\nother:\n  role: target\n", NAME, checkpoint_block(receipt, entry))
    assert below.count("tiny-drafter:") == 1 and below.endswith("other:\n  role: target\n")
    [(name, block)] = serving_blocks(entry).items()
    assert name == "vllm-base-tiny-drafter"
    copy = inventory.parent / "published"
    shutil.copytree(inventory, copy, dirs_exist_ok=True)
    (copy / "checkpoints.yaml").write_text(once)
    (copy / "serving.yaml").write_text(with_block((copy / "serving.yaml").read_text(), name, block))
    catalog = load_catalog("sandbox-training.yaml", copy)
    assert catalog.checkpoints[NAME].training.layer_ids == [2]
    assert catalog.serving[name].drafter == NAME
    with pytest.raises(ContractError, match="the receipt: not JSON"):
        Receipt.of("{", "the receipt")
