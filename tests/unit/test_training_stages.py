"""The stages of a training without the trainer: prompts, states, export, what a killed run leaves, and what follows
from counts."""

import importlib.util
import json
import lzma
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.bench import plots, training_report
from rigctl.checkpoints import fit, headers
from rigctl.contract.conversations import Conversation, Prompt, Split, read, split, unique
from rigctl.contract.eagle3_conventions import Engine
from rigctl.contract.evaluation import (
    Asked,
    Cost,
    Drafter,
    Evaluation,
    InEngine,
    Origin,
    Speed,
    break_even,
    by_domain,
    next_rung,
    paired,
    paying,
    suspects,
)
from rigctl.contract.served_checkpoints import Training
from rigctl.contract.training_job import Served, States, Trainer, TrainingJob
from rigctl.errors import RigctlError
from rigctl.tiny_models.checkpoints import checkpoint_files
from rigctl.tiny_models.kimi import CHAT, KIMI, TOOL_CALL
from rigctl.tiny_models.numbers import safetensors_bytes
from rigctl.training import answers, draft_config, export, portable, states, states_check, tensors, text_view, train
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Progress
from tests.support.tiny_training import digest, row, states_file
from tests.training import many_chains

SHIPPED = Path(__file__).resolve().parents[2] / "files/prompts"
FILES = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def line(text: str = "hello", **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more})


# Prompts: foreign files.


@FILES
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_line_or_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    try:
        found = list(read(path, "chat"))
    except RigctlError as error:
        assert str(error).startswith(f"{path}:")
    else:
        assert not data.strip() or found


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["user", "tool", "system"])
VALUES = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=8), PLAIN, max_size=2)
ODD = st.fixed_dictionaries(
    {"messages": VALUES | st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=3)},
    optional={"tools": VALUES, "id": VALUES},
)


@FILES
@given(ODD)
def test_odd_conversations_are_refused_by_line_or_can_be_answered(tmp_path: Path, found: dict[str, Any]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(found) + "\n")
    try:
        prompts = list(read(path, "chat"))
    except RigctlError as error:
        assert re.match(rf"{re.escape(str(path))}:1: \S", str(error)) and "\n" not in str(error)
        return
    for prompt in prompts:
        said = prompt.row()
        assert any(message["role"] == "user" and message["content"].strip() for message in said["messages"])
        assert all(isinstance(message["content"], str) for message in said["messages"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "messages"),
        ('{"messages": []}', "no message of a user"),
        ('{"messages": [{"role": "user", "content": " "}]}', "without text"),
        ('{"messages": [{"role": "human", "content": "a"}]}', "role"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}', "declares no tools"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}', "comes first"),
        (line(tools=[{"name": "x"}]), "a tool is"),
        ("\xff", "not JSON"),
    ],
)
def test_a_refusal_names_line_and_cause(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{line()}\n{text}\n")
    with pytest.raises(RigctlError, match=re.escape(f"{path}:2: ")) as caught:
        list(read(path, "chat"))
    assert why in str(caught.value)


def some(count: int, domain: str = "chat") -> list[Prompt]:

    return [
        Prompt(f"{domain}-{n}", domain, Conversation.model_validate_json(line(f"question {n}"))) for n in range(count)
    ]


@given(
    count=st.integers(10, 80),
    share=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_no_conversation_is_trained_on_and_held_out(count: int, share: float, seed: int, order: Any) -> None:
    prompts = some(count) + some(count // 2, "tools")
    shuffled = list(prompts)
    order.shuffle(shuffled)
    largest = count // 2
    one, other = split(prompts, share, seed, largest), split(shuffled, share, seed, largest)
    assert one == other, "the order of the files changes nothing"
    training, held_out = ({prompt.id for prompt in part} for part in (one.training, one.held_out))
    assert not training & held_out
    assert len(training) == largest and {prompt.domain for prompt in one.held_out} == {"chat", "tools"}
    smaller = split(prompts, share, seed, largest).training[: largest // 2]
    assert one.training[: largest // 2] == smaller, "a rung's conversations are the first ones of the next"


def test_a_ladder_that_is_too_long_is_refused() -> None:
    with pytest.raises(RigctlError, match=r"the ladder asks for 10 conversations"):
        split(some(10), 0.2, 0, 10)


def test_shipped_prompts_are_read_and_each_is_there_once() -> None:
    found = [prompt for path in sorted(SHIPPED.glob("*.jsonl")) for prompt in read(path, path.stem)]
    assert {prompt.domain for prompt in found} == {"chat", "code", "reasoning", "tools"}
    assert len(unique(found)) == len(found) > 100
    assert all(prompt.conversation.tools for prompt in found if prompt.domain == "tools")


# Answers: what a killed run leaves.


def answered(name: str, count: int) -> list[str]:
    return [json.dumps({"id": f"{name}_gen{n}", "primary_id": name, "loss_mask": [1]}) + "\n" for n in range(count)]


@pytest.mark.parametrize("cut", [0, 1, 10])
def test_a_conversation_that_may_be_half_written_is_asked_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "answers.jsonl"
    text = "".join(answered("a", 2) + answered("b", 2))
    path.write_text(text[: len(text) - cut])
    answers.keep_whole(path)
    assert [one["primary_id"] for one in answers.rows(path)] == ["a", "a"]


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("ValueError('empty assistant generation (sample 0)')", "answers.max_tokens"),
        ("InvalidResponseError('HTTP 401 from http://x: no')", "keyless"),
        ("ClientConnectorError(Cannot connect to host)", "died"),
        ("KeyError('choices')", "tries these again"),
    ],
)
def test_errors_are_no_success(tmp_path: Path, error: str, cure: str) -> None:
    path = tmp_path / "answers.errors.jsonl"
    path.write_text(json.dumps({"id": "chat-1", "metadata": {"error": error}}) + "\n")
    with pytest.raises(RigctlError, match="1 of 60 conversations have no answer, the first is chat-1") as caught:
        answers.check(path, 60)
    assert cure in str(caught.value)
    answers.check(path, 200)  # one in a hundred is forgiven


# The target and the drafter's shape.


def test_the_text_view_is_a_plain_text_model(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name, data in checkpoint_files("target").items():
        (target / name).write_bytes(data)
    for _ in range(2):
        text_view.write(target, tmp_path / "view")
    config = json.loads((tmp_path / "view/config.json").read_text())
    assert (config["model_type"], config["hidden_size"], "vision_config" in config) == ("deepseek_v3", 256, False)
    assert (tmp_path / "view/model.safetensors").resolve() == target / "model.safetensors"
    assert not (tmp_path / "view/preprocessor_config.json").exists(), "its processor would want images"


def test_a_draft_configuration_follows_the_target_and_stays_portable() -> None:
    target = {"hidden_size": 7168, "vocab_size": 163840, "qk_rope_head_dim": 64, "rope_scaling": {"type": "yarn"}}
    config = draft_config.draft_config(target, {"intermediate_size": 18432})
    assert (config["head_dim"], config["num_attention_heads"], config["intermediate_size"]) == (128, 56, 18432)
    assert portable.refusals({"transformer_layer_config": config}) == []
    for wrong in ({"hidden_size": 1}, {"sliding_window": 2048}, {"rope_scaling": {"type": "yarn"}}):
        with pytest.raises(RigctlError, match=r"recipe\.draft"):
            draft_config.draft_config(target, wrong)


# States.


def test_states_of_the_automaton_pass(tmp_path: Path) -> None:
    tokens = row(KIMI, "hello", CHAT)["input_ids"]
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(states_file(KIMI, tokens))
    states_check.check(path, layers=4, hidden=256, sha256=digest(tokens))
    for wrong, why in (({"layers": 3}, "must be"), ({"hidden": 128}, "must be"), ({"sha256": "0" * 64}, "not those")):
        with pytest.raises(headers.BadFile, match=why):
            states_check.check(path, **{"layers": 4, "hidden": 256, **wrong})  # type: ignore[arg-type]


@FILES
@given(cut=st.integers(0, 3000), flip=st.integers(0, 2999), value=st.integers(0, 255))
def test_states_that_are_cut_or_changed_raise_bad_file_alone(tmp_path: Path, cut: int, flip: int, value: int) -> None:
    data = bytearray(states_file(KIMI, [1, 2, 3], layers=1))
    data[flip % len(data)] = value
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(data[: len(data) - cut])
    try:
        states_check.check(path, layers=1, hidden=256, sha256=digest([1, 2, 3]))
    except headers.BadFile:
        return
    assert cut == 0


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    data = bytearray(states_file(KIMI, [1, 2], layers=1))
    start = 8 + int.from_bytes(data[:8], "little")
    where = start if headers_first(bytes(data)) else start + 16
    data[where : where + 2] = b"\xc0\x7f"  # a NaN in bfloat16
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(data)
    with pytest.raises(headers.BadFile, match="1 of 512 numbers are not finite"):
        states_check.check(path, layers=1, hidden=256)


def headers_first(data: bytes) -> bool:
    """Whether the states come before the tokens."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return bool(header["hidden_states"]["data_offsets"][0] == 0)


def test_layer_ids_by_convention() -> None:
    assert states_check.inputs("input", [2, 30, 58], 61) == [2, 30, 58, 61]
    assert states_check.inputs("output", [1, 29, 57], 61) == [2, 30, 58, 61]
    assert states_check.inputs("engine-default", [], 61) == [2, 30, 58, 61]
    for convention, ids in (("unknown", [2]), ("input", [3, 2]), ("output", [61])):
        with pytest.raises(headers.BadFile, match="layer ids"):
            states_check.inputs(convention, ids, 61)  # type: ignore[arg-type]


# Export.

LAYER = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": 64,
    "max_position_embeddings": 128, "attention_bias": False, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
TRAINED = {
    "architectures": ["Eagle3DraftModel"], "auto_map": {"AutoConfig": "config.Eagle3SpeculatorConfig"},
    "dtype": "bfloat16", "draft_vocab_size": 24, "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    "norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "embed_requires_grad": False,
    "transformer_layer_config": LAYER,
}  # fmt: skip


def trained(folder: Path, **changed: Any) -> Path:
    """A checkpoint as speculators 0.9.0 leaves it, of 16 hidden numbers."""
    shapes = {
        "embed_tokens.weight": (64, 16), "fc.weight": (16, 48), "norm.weight": (16,), "lm_head.weight": (24, 16),
        "layers.0.input_layernorm.weight": (16,), "layers.0.hidden_norm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,), "layers.0.self_attn.q_proj.weight": (16, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32), "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (16, 16), "layers.0.mlp.gate_proj.weight": (32, 16),
        "layers.0.mlp.up_proj.weight": (32, 16), "layers.0.mlp.down_proj.weight": (16, 32),
    }  # fmt: skip
    dice = np.random.default_rng(1)
    made: dict[str, Any] = {name: dice.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    known = np.zeros(64, np.bool_)
    known[8:32] = True
    made |= {"d2t": np.full(24, 8, np.int64), "t2d": known}
    made = {name: values for name, values in made.items() if name not in changed.get("without", ())}
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(made))
    config = TRAINED | changed.get("config", {})
    config["transformer_layer_config"] = LAYER | changed.get("layer", {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "config.py").write_text("raise SystemExit('remote code')")
    return folder


def small_target(folder: Path) -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 7, "vocab_size": 64}
    config = {"model_type": "kimi_k2", "torch_dtype": "bfloat16", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_export_is_what_every_release_serves(tmp_path: Path) -> None:
    source, made = trained(tmp_path / "0"), tmp_path / "made"
    for _ in range(2):
        export.export(source, made, [2, 3, 4])
    assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors"}
    before, after = headers.read(source / "model.safetensors"), headers.read(made / "model.safetensors")
    assert set(after) == export.NEEDED | export.MAPS
    for name, tensor in after.items():
        theirs = before[name.replace("midlayer", "layers.0")]
        assert (tensor.dtype, tensor.shape) == (theirs.dtype, theirs.shape)
        assert tensors.data(tensor) == tensors.data(theirs)
    config = json.loads((made / "config.json").read_text())
    assert "auto_map" not in config and config["rope_theta"] == 10000.0 and config["draft_vocab_size"] == 24
    target = small_target(tmp_path / "target")
    releases = {"vllm": ("0.16.0", "0.33.0"), "sglang": ("0.5.9", "0.5.16", "0.5.23")}
    for engine in (Engine(name, version) for name, versions in releases.items() for version in versions):
        verdict = fit.check(target, made, engine, 128, Training(convention="input", layer_ids=[2, 3, 4]))
        assert verdict.word == "fits", (engine, verdict.lines())
        assert verdict.captured == [2, 3, 4]


@pytest.mark.parametrize(
    ("config", "layer", "named"),
    [
        ({"norm_before_residual": True}, {}, "SGLang 0.5.16, SGLang 0.5.23"),
        ({"norm_before_fc": True}, {}, "vLLM 0.16.0, SGLang 0.5.16"),
        ({"norm_output": True}, {}, "vLLM 0.16.0"),
        ({"fc_norm": True}, {}, "vLLM 0.33.0"),
        ({}, {"layer_types": ["sliding_attention"]}, "SGLang 0.5.23"),
        ({}, {"sliding_window": 2048}, "vLLM 0.16.0"),
        ({}, {"rope_parameters": {"rope_type": "yarn", "factor": 64}}, "plain RoPE"),
        ({}, {"num_hidden_layers": 2}, "one layer"),
        ({}, {"head_dim": None}, "head_dim"),
        ({"embed_requires_grad": True}, {}, "--embed-requires-grad"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}, {}, "the order says"),
    ],
)
def test_what_a_release_would_misread_is_not_exported(
    tmp_path: Path, config: dict[str, Any], layer: dict[str, Any], named: str
) -> None:
    source = trained(tmp_path / "0", config=config, layer=layer)
    with pytest.raises(RigctlError, match=re.escape(named)):
        export.export(source, tmp_path / "made", [2, 3, 4])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("without", "why"), [("fc.weight", "missing: fc.weight"), ("t2d", "belong together")])
def test_an_incomplete_checkpoint_is_not_exported(tmp_path: Path, without: str, why: str) -> None:
    with pytest.raises(RigctlError, match=why):
        export.export(trained(tmp_path / "0", without=(without,)), tmp_path / "made", [2, 3, 4])


def test_a_drafter_with_another_vocabulary_than_its_start_is_refused(tmp_path: Path) -> None:
    start, source = trained(tmp_path / "start"), trained(tmp_path / "0")
    export.same_vocabulary(start, source)
    other = trained(tmp_path / "other", without=("d2t", "t2d"))
    with pytest.raises(RigctlError, match="another vocabulary map"):
        export.same_vocabulary(start, other)


def test_a_float32_copy_has_the_same_numbers(tmp_path: Path) -> None:
    source = trained(tmp_path / "0")
    train.float32(source, tmp_path / "copy")
    before, after = headers.read(source / "model.safetensors"), headers.read(tmp_path / "copy/model.safetensors")
    for name, tensor in after.items():
        if name in export.MAPS:
            assert tensors.data(tensor) == tensors.data(before[name])
            continue
        assert tensor.dtype == "F32"
        mine = tensors.as_float32(tensors.data(tensor), "F32")
        assert np.array_equal(mine, tensors.as_float32(tensors.data(before[name]), before[name].dtype))
    with safetensors.safe_open(tmp_path / "copy/model.safetensors", "numpy") as found:
        assert found.get_tensor("fc.weight").dtype == np.float32
    config = json.loads((tmp_path / "copy/config.json").read_text())
    assert config["dtype"] == "float32" and "auto_map" not in config


# Checkpoints after a kill.


def checkpoint(root: Path, epoch: int, *, step: int = 0, total: int = 10) -> Path:
    folder = trained(root / str(epoch))
    with zipfile.ZipFile(folder / train.OPTIMIZER, "w") as archive:
        archive.writestr("data", b"state")
    (folder / train.STATE).write_text(json.dumps({"epoch": epoch, "local_step": step, "global_step": total}))
    return folder


def test_a_checkpoint_cut_anywhere_is_removed_and_the_one_before_taken(tmp_path: Path) -> None:
    for name in (train.WEIGHTS, train.OPTIMIZER, train.STATE):
        root = tmp_path / name
        root.mkdir()
        checkpoint(root, 0)
        broken = checkpoint(root, 1) / name
        broken.write_bytes(broken.read_bytes()[:-9])
        os.utime(broken.parent / train.STATE)
        (root / "interrupted").mkdir()
        assert train.mend(root, epochs=3, log=tmp_path / "none")
        assert sorted(path.name for path in root.iterdir()) == ["0"], name


def test_weights_newer_than_their_state_are_not_resumed_from(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 0, step=5)
    assert train.whole(folder)
    os.utime(folder / train.WEIGHTS, ns=(0, (folder / train.STATE).stat().st_mtime_ns + 1))
    assert not train.whole(folder)


def test_a_kill_in_the_last_validation_leaves_the_validation_to_do(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1, total=38)
    assert train.mend(tmp_path, epochs=2, log=tmp_path / "none")
    assert json.loads((folder / train.STATE).read_text()) == {"epoch": 1, "local_step": 38, "global_step": 38}


def test_the_epoch_with_the_greatest_length_is_taken_not_the_one_of_the_lowest_loss(tmp_path: Path) -> None:
    """As measured on the model of many chains: certainty about what was never trained on raises the loss."""
    place = Workplace(tmp_path, Step("train", 5))
    place.checkpoints.mkdir(parents=True)
    log = tmp_path / "log"
    said = {2: (4.739, 0.329, 0.111, 0.041), 6: (5.631, 0.348, 0.315, 0.297), 7: (5.740, 0.344, 0.317, "3.00e-01")}
    lines = [
        f"[13:20:22] INFO val/loss_epoch={loss}, "
        + ", ".join(f"val/full_acc_{n}_epoch={one}" for n, one in enumerate(right))
        for loss, *right in said.values()
    ]
    log.write_text("".join(f"{line}, epoch={epoch} trainer.py:671\n" for epoch, line in zip(said, lines, strict=True)))
    for epoch in said:
        checkpoint(place.checkpoints, epoch)
    (place.checkpoints / "2" / train.METRICS).write_text(json.dumps({"loss_epoch": 4.7, "full_acc_0_epoch": 0.32857}))
    checkpoint(place.checkpoints, 8)
    train.note_validations(log, place.checkpoints)
    assert train.finished(place).name == "7" and train.length(train.read_metrics(train.finished(place))) == 1.961
    assert train.read_metrics(place.checkpoints / "2")["full_acc_0_epoch"] == 0.32857, "the trainer's own stay"
    assert not (place.checkpoints / "8" / train.METRICS).exists()


def test_without_a_validated_epoch_there_is_no_drafter(tmp_path: Path) -> None:
    place = Workplace(tmp_path, Step("train", 5))
    for _ in range(2):
        with pytest.raises(RigctlError, match="no finished training"):
            train.finished(place)
        place.checkpoints.mkdir(parents=True, exist_ok=True)


def test_offline_length_is_one_more_than_what_is_right_at_each_position() -> None:
    metrics = {f"full_acc_{at}_epoch": share for at, share in enumerate((0.971, 0.913, 0.881))} | {
        "cond_acc_1_epoch": 0.9
    }
    assert train.positions(metrics) == [0.971, 0.913, 0.881]
    assert train.length(metrics) == pytest.approx(3.765)


# Evaluation: arithmetic.


def asked(drafts: int, accepted: int, domain: str = "chat", name: str = "c") -> Asked:
    return Asked(
        conversation=name, domain=domain, tokens=drafts + accepted + 1, drafts=drafts, accepted=accepted, identical=True
    )


def drafter(accepted: int, rung: int | None = None, **more: Any) -> Drafter:
    rows = [asked(20, accepted, name=f"c{n}") for n in range(3)] + [asked(10, 5, "tools", "t")]
    found = InEngine(
        steps=3, asked=rows, positions=more.pop("positions", [60, 40, 20]),
        speeds=[Speed(streams=1, base=50, drafting=100), Speed(streams=32, base=900, drafting=700)],
    )  # fmt: skip
    return Drafter(
        rung=rung, origin=more.pop("origin", Origin()), engines=more.pop("engines", {"vllm-x": found}), **more
    )


def evaluation(**drafters: Drafter) -> Evaluation:
    cost = Cost(tokens_a_conversation=1444, bytes_a_token=57344, rate=3165)
    return Evaluation(format=1, name="x", target="kimi", drafters=drafters, cost=cost)


def test_lengths_by_domain_and_break_even() -> None:
    one = drafter(40).engines["vllm-x"]
    assert by_domain(one.asked) == {"chat": 3.0, "tools": 1.5}
    assert one.length == pytest.approx(1 + 125 / 70)
    # A step that costs 1.4 steps of the base: below that length it loses.
    assert break_even(one, one.speeds[0]) == pytest.approx(one.length / 2)
    assert break_even(one, one.speeds[1]) == pytest.approx(one.length * 9 / 7)
    assert InEngine(steps=3, asked=[]).length == 1.0


def test_which_rung_pays_and_what_the_next_costs() -> None:
    found = evaluation(**{"rung-1000": drafter(20, 1000), "rung-10000": drafter(30, 10000)})
    assert paying(found)[1] == "vllm-x, 32 streams: no drafter (900 tok/s)"
    assert "2.00 times the base" in paying(found)[0]
    said = next_rung(found) or ""
    assert said.startswith("100,000 conversations would be 144.4 M tokens, 8,280 GB of states, 12.7 hours")
    assert said.endswith(f"comes to {1 + 95 / 70 + 30 / 70:.2f}")
    assert "cannot be said" in (next_rung(evaluation(one=drafter(20, 1000))) or "")


def test_the_suspects_are_named_when_they_are_there_and_only_then() -> None:
    good = Origin(
        target="kimi", samples=10000, begun_with="kimi", states_engine="vllm", learning_rate=2e-5, dtype="float32"
    )
    assert suspects("own", drafter(40, 10000, origin=good, offline=[0.9, 0.8, 0.7]), "kimi") == []
    for change, word in (
        ({"target": "kimi-k2"}, "another model"),
        ({"begun_with": "kimi-k2"}, "they do not make one"),
        ({"begun_with": None}, "begins untrained"),
        ({"dtype": "bfloat16"}, "round to nothing"),
    ):
        said = suspects("own", drafter(40, origin=good.model_copy(update=change)), "kimi")
        assert len(said) == 1 and word in said[0], said
    shifted = drafter(3, origin=good, positions=[7, 2, 0], offline=[0.9, 0.8, 0.7])
    assert "layer ids one off" in suspects("own", shifted, "kimi")[0]
    assert "vllm#43671" in suspects("own", drafter(3, origin=good, positions=[7, 2, 0]), "kimi")[0]


def test_an_engine_that_does_worse_with_the_same_prompts_is_named_with_its_spread() -> None:
    here = InEngine(steps=3, asked=[asked(20, 40 + n % 2, name=f"c{n}") for n in range(8)], positions=[150, 100, 80])
    worse = InEngine(steps=3, asked=[asked(20, 20 + n % 3, name=f"c{n}") for n in range(8)])
    gap, error, count = paired(here.asked, worse.asked) or (0, 0, 0)
    assert gap == pytest.approx(-0.9812, abs=0.01) and 0 < error < 0.05 and count == 8
    origin = Origin(target="kimi", states_engine="vllm", samples=10000, begun_with="kimi")
    found = drafter(0, origin=origin, engines={"vllm-x": here, "sglang-x": worse})
    said = suspects("own", found, "kimi")
    assert len(said) == 1 and "learnt from states of vllm" in said[0] and "shorter in sglang-x" in said[0]
    assert paired(here.asked[:1], worse.asked) is None


# The ladder of many chains: what is predicted does not move.


def test_predictions_of_the_ladder_are_those_written_down_before_it_was_trained() -> None:
    written = json.loads((Path(__file__).resolve().parents[1] / "fixtures/many_chains.json").read_text())
    assert list(written) == [str(rung) for rung in many_chains.RUNGS]
    for rung in many_chains.RUNGS:
        said = written[str(rung)]
        assert said["topics"] == sorted(many_chains.covered(rung))
        assert said["predicted"] == pytest.approx(many_chains.predicted(rung))
        assert said["counters"] == json.loads(json.dumps(vars(many_chains.counters(rung))))
        for measured, expected in zip(said.get("measured", said["predicted"]), said["predicted"], strict=True):
            assert abs(measured - expected) <= many_chains.NEAR
    first = [many_chains.coverage(rung) for rung in many_chains.RUNGS]
    assert first == sorted(first) and first[-1] - first[0] > 0.5


# The report.


def test_the_report_shows_rungs_domains_what_pays_and_the_gap_between_engines() -> None:
    here, there = drafter(40).engines["vllm-x"], drafter(20).engines["vllm-x"]
    found = evaluation(
        **{
            "rung-0": drafter(0, 0),
            "rung-1000": drafter(20, 1000, offline=[0.6, 0.4, 0.3]),
            "rung-10000": drafter(30, 10000, offline=[0.7, 0.5, 0.4], engines={"vllm-x": here, "sglang-x": there}),
            "their<b>own": drafter(10),
        }
    ).model_copy(update={"findings": ["own \x1b[31mred"]})
    text = training_report.markdown(found)
    assert "| rung-10000 | 10,000 | 2.60 | vllm-x | 2.79 |" in text
    assert "| rung-1000 | vllm-x | 2.00 | 1.50 |" in text, "chat and tools"
    assert "| vllm-x | 1 | 50.0 | 100.0 | 2.00 |" in text
    assert "| rung-10000 | vllm-x | sglang-x | -0.750 |" in text
    assert "\x1b" not in text and "<b>" not in text
    if importlib.util.find_spec("matplotlib"):
        page = training_report.page(found)
        assert page.count("<svg") == 1 and "<b>" not in page and "10,000" in page
    else:
        with pytest.raises(plots.PlottingMissing):
            training_report.page(found)


# What vLLM 0.32.0 (CPU) and speculators 0.9.0 wrote for target-wide: two conversations, one of them with a tool.

RECORDED = Path(__file__).resolve().parents[1] / "fixtures/training"


def test_recorded_answers_are_what_the_automaton_says_and_nothing_else_is_trained_on() -> None:
    found = list(answers.rows(RECORDED / "answers.jsonl"))
    ends = [CHAT, CHAT, TOOL_CALL, CHAT]
    assert [one["metadata"]["is_tool_call"] for one in found] == [end == TOOL_CALL for end in ends]
    for one, end in zip(found, ends, strict=True):
        said = row(KIMI, "", end)
        own = [token for token, mask in zip(one["input_ids"], one["loss_mask"], strict=True) if mask]
        assert own == [token for token, mask in zip(said["input_ids"], said["loss_mask"], strict=True) if mask]
        assert one["input_ids"][one["loss_mask"].index(1) - 1] == KIMI.special[end]


def test_recorded_answers_are_divided_by_conversation(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes((RECORDED / "answers.jsonl").read_bytes())
    names = list(dict.fromkeys(one["primary_id"] for one in answers.rows(path)))
    told = Conversation.model_validate_json(line())
    one, other = (Prompt(name, "chat", told) for name in names)
    answers.write_split(Split([one], [other]), path, tmp_path)
    assert [len(list(answers.rows(tmp_path / f"{part}.jsonl"))) for part in ("train", "held_out")] == [2, 2]
    answers.keep_whole(path)
    assert {one["primary_id"] for one in answers.rows(path)} == set(names[:1])
    with pytest.raises(RigctlError, match="no conversation of held_out has an answer"):
        answers.write_split(Split([one], [other]), path, tmp_path)


def test_recorded_states_are_those_of_the_automaton_bit_for_bit(tmp_path: Path) -> None:
    """Inputs of layers 2, 3 and 4, and the last state, as cpu_connector.py has written them."""
    first = next(answers.rows(RECORDED / "answers.jsonl"))["input_ids"]
    recorded, ours = tmp_path / "recorded.safetensors", tmp_path / "ours.safetensors"
    recorded.write_bytes(lzma.decompress((RECORDED / "states.safetensors.xz").read_bytes()))
    tokens = np.frombuffer(tensors.data(headers.read(recorded)["token_ids"]), "<i8").tolist()
    assert len(tokens) == len(first)
    ours.write_bytes(states_file(KIMI, tokens))
    states_check.check(recorded, layers=4, hidden=256, sha256=digest(tokens))
    assert all(
        tensors.data(tensor) == tensors.data(headers.read(ours)[name])
        for name, tensor in headers.read(recorded).items()
    )


def test_rows_that_one_pass_leaves_out_are_extracted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Workplace(tmp_path / "t", Step("states", 3))
    tokens = [[1, 2, n] for n in range(3)]
    place.prepared.mkdir(parents=True)
    said = [{"sha256": digest(one), "tokens": 3, "trained": 1, "held_out": False} for one in tokens]
    (place.prepared / "rows.json").write_text(json.dumps(said))
    staging = tmp_path / "staging"
    (staging / "stray").mkdir(parents=True)
    order = TrainingJob.model_construct(
        hidden=256,
        states=States.model_construct(
            layer_ids=[2, 3, 4, 7], staging=str(staging), concurrency=1, served=Served.model_construct(url="http://x")
        ),
        trainer=Trainer.model_construct(environment_path="/none", starter=None, gpus=[], variables={}),
    )  # fmt: skip
    passes: list[int] = []

    def run(*_: Any, **more: Any) -> None:
        rows = [[0], [1], []][len(passes)]
        passes.append(len(rows))
        more["log"].parent.mkdir(exist_ok=True)
        more["log"].write_text("INFO Skipped\n")
        for number in rows:
            (place.states / f"hs_{number}.safetensors").write_bytes(states_file(KIMI, tokens[number]))

    monkeypatch.setattr(states.tool, "run", run)
    place.root.mkdir(exist_ok=True)
    with pytest.raises(RigctlError, match="1 of 3 rows have no states, the first is row 2: INFO Skipped"):
        states.run(order, place, Progress(place.root, place.step))
    assert passes == [1, 1, 0] and not list(staging.iterdir())
    assert sorted(path.stem for path in place.kept.iterdir()) == sorted(digest(one) for one in tokens[:2])
    # Cut by a kill, and changed: both are made anew; another rung takes what is kept.
    (place.states / "hs_2.safetensors").write_bytes(states_file(KIMI, tokens[2])[:-1])
    passes.clear()
    with pytest.raises(RigctlError, match="the first is row 2"):
        states.run(order, place, Progress(place.root, place.step))
    other = place.at(rung=2)
    other.prepared.mkdir(parents=True)
    (other.prepared / "rows.json").write_text(json.dumps(said[:2]))
    passes.clear()
    states.run(order, other, Progress(place.root, other.step))
    assert passes == [] and (other.states / "hs_1.safetensors").exists()
