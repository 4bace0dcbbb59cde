"""Drafters against their target: a table of pairs with their verdicts, and the overlay that repairs one."""

from __future__ import annotations

import json
import math
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rigctl.checkpoints import fit, headers, overlay
from rigctl.checkpoints.headers import BadFile
from rigctl.cli import main
from rigctl.contract.eagle3_conventions import KEY, Convention, Engine, default_ids, trained_input_ids
from rigctl.contract.served_checkpoints import Training
from rigctl.errors import RigctlError

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS, CONTEXT = 64, 512, 128, 61, 32768
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1, "I8": 1}
Shape = tuple[str, tuple[int, ...]]


def write_tensors(place: Path, tensors: dict[str, Shape], data: dict[str, bytes] | None = None) -> None:
    """A safetensors file; tensors without data are zeros."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape) in tensors.items():
        content = (data or {}).get(name, bytes(math.prod(shape) * SIZES[dtype]))
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(content)],
        }
        body += content
    raw = json.dumps(header).encode()
    place.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def make_target(root: Path, **text: Any) -> Path:
    """A multimodal target in the form of Kimi-K2.5."""
    root.mkdir()
    inner = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "dtype": "bfloat16",
        **text,
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner}
    (root / "config.json").write_text(json.dumps(config))
    return root


def make_drafter(
    root: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Shape | None] | None = None,
    mla: bool = False,
    targets: list[int] | None = None,
    listed: list[int] | None = None,
) -> Path:
    """A drafter that fits; `config` and `tensors` override (None removes), `targets` are d2t's tokens."""
    root.mkdir()
    content = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
        **(config or {}),
    }
    content = {key: value for key, value in content.items() if value is not None}
    (root / "config.json").write_text(json.dumps(content))
    attention = "kv_a_proj_with_mqa" if mla else "k_proj"
    shapes: dict[str, Shape | None] = {
        f"midlayer.self_attn.{attention}.weight": ("BF16", (16, 2 * HIDDEN)),
        "fc.weight": ("BF16", (HIDDEN, 3 * HIDDEN)),
        "norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (DRAFT_VOCAB, HIDDEN)),
        "d2t": ("I64", (DRAFT_VOCAB,)),
        "t2d": ("BOOL", (VOCAB,)),
        **(tensors or {}),
    }
    tokens = list(range(0, 4 * DRAFT_VOCAB, 4)) if targets is None else targets
    data = {}
    if shapes.get("d2t") is not None and shapes["d2t"] == ("I64", (DRAFT_VOCAB,)):
        data["d2t"] = struct.pack(f"<{DRAFT_VOCAB}q", *(token - index for index, token in enumerate(tokens)))
    if shapes.get("t2d") == ("BOOL", (VOCAB,)):
        chosen = set(tokens if listed is None else listed)
        data["t2d"] = bytes(token in chosen for token in range(VOCAB))
    write_tensors(
        root / "model.safetensors", {name: shape for name, shape in shapes.items() if shape is not None}, data
    )
    return root


def known(engine: Engine) -> frozenset[str]:
    """Architectures of a release as its record has them."""
    record = json.loads((ROOT / f"files/releases/{engine.name}-{engine.version}.json").read_text())
    return frozenset(record["registry"]["architectures"])


VLLM, VLLM_NEW = Engine("vllm", "0.16.0"), Engine("vllm", "0.33.0")
SGLANG, SGLANG_NEW = Engine("sglang", "0.5.9"), Engine("sglang", "0.5.23")
DEFAULT = Training(target="kimi", convention="engine-default")
FULL = {"lm_head.weight": ("BF16", (VOCAB, HIDDEN)), "d2t": None, "t2d": None}


@dataclass(frozen=True)
class Pair:
    """One row: what the drafter has, on which engine, and the verdict with a piece of its text."""

    name: str
    verdict: str
    says: str = ""
    engine: Engine = VLLM
    training: Training = DEFAULT
    context: int = CONTEXT
    drafter: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    refusals: int = 1


def nested(ids: list[int]) -> dict[str, Any]:
    """Layer ids as SpecForge writes them."""
    return {"eagle_config": {KEY: ids, "use_aux_hidden_state": True}}


PAIRS = [
    Pair("plain attention on vLLM", "fits"),
    Pair("plain attention on SGLang", "fits", engine=SGLANG),
    Pair("MLA on new vLLM", "fits", engine=VLLM_NEW, drafter={"mla": True}),
    Pair("MLA on new SGLang", "fits", engine=SGLANG_NEW, drafter={"mla": True}),
    Pair(
        "full vocabulary without tables",
        "fits",
        drafter={"config": {"draft_vocab_size": None}, "tensors": FULL},
    ),
    Pair(
        "full vocabulary that shares the target's head",
        "fits",
        drafter={
            "config": {"draft_vocab_size": VOCAB},
            "tensors": {"lm_head.weight": None, "d2t": None, "t2d": None},
        },
    ),
    Pair(
        "output ids, nested, on SGLang",
        "fits",
        engine=SGLANG,
        training=Training(target="kimi", convention="output"),
        drafter={"config": nested([1, 29, 57])},
    ),
    Pair(
        "input ids on top, vLLM",
        "fits",
        training=Training(target="kimi", convention="input"),
        drafter={"config": {KEY: [3, 31, 59]}},
    ),
    Pair(
        "MLA on vLLM 0.16",
        "refused",
        "does not know the architecture Eagle3DeepseekV2ForCausalLM",
        drafter={"mla": True},
    ),
    Pair("MLA on SGLang 0.5.9", "refused", "does not know", engine=SGLANG, drafter={"mla": True}),
    Pair(
        "an architecture of a later release",
        "fits",
        engine=VLLM_NEW,
        drafter={"config": {"architectures": ["Eagle3Qwen3ForCausalLM"]}},
    ),
    Pair(
        "an architecture that is misspelt",
        "refused",
        'did you mean "LlamaForCausalLMEagle3"',
        drafter={"config": {"architectures": ["LlamaForCausalEagle3"]}},
    ),
    Pair(
        "MLA name, plain weights",
        "refused",
        "no kv_a_proj",
        engine=VLLM_NEW,
        drafter={"config": {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}},
    ),
    Pair(
        "speculators export on SGLang",
        "refused",
        "export it as LlamaForCausalLMEagle3",
        engine=SGLANG,
        drafter={"config": {"architectures": ["Eagle3Speculator"]}},
    ),
    Pair(
        "another hidden size",
        "refused",
        "hidden size 64 of the drafter",
        target={"hidden_size": 128},
        refusals=2,
    ),
    Pair("another vocabulary", "refused", "another tokenizer", target={"vocab_size": 1024}),
    Pair("small vocabulary without d2t", "refused", "without d2t", drafter={"tensors": {"d2t": None}}),
    Pair(
        "d2t beyond the vocabulary",
        "refused",
        "the target has 0..511",
        drafter={"targets": [*range(DRAFT_VOCAB - 1), VOCAB]},
    ),
    Pair(
        "d2t with a token twice",
        "refused",
        "two drafted ids",
        drafter={"targets": [0, *range(DRAFT_VOCAB - 1)]},
    ),
    Pair(
        "t2d of another vocabulary",
        "refused",
        "do not describe one",
        drafter={"listed": list(range(DRAFT_VOCAB))},
    ),
    Pair(
        "d2t with a full vocabulary on vLLM",
        "refused",
        "vLLM has no parameter",
        drafter={
            "config": {"draft_vocab_size": VOCAB},
            "tensors": {"lm_head.weight": ("BF16", (VOCAB, HIDDEN)), "d2t": ("I64", (VOCAB,)), "t2d": None},
        },
    ),
    Pair(
        "head of another size",
        "refused",
        "lm_head has 100 rows",
        drafter={"tensors": {"lm_head.weight": ("BF16", (100, HIDDEN))}},
    ),
    Pair("not EAGLE-3", "refused", "no tensor fc.weight", drafter={"tensors": {"fc.weight": None}}),
    Pair(
        "layer id outside",
        "refused",
        "outside the target's 61 layers",
        training=Training(target="kimi"),
        drafter={"config": {KEY: [2, 30, 61]}},
    ),
    Pair(
        "too small a target for the default ids",
        "refused",
        "die at the first request",
        target={"num_hidden_layers": 6},
    ),
    Pair(
        "four ids for a join of three",
        "refused",
        "fc.weight joins 3 layers",
        training=Training(target="kimi"),
        drafter={"config": {KEY: [2, 30, 58, 60]}},
    ),
    Pair(
        "speculators 0.4 drafter with default ids: one off on vLLM",
        "refused",
        f'"{KEY}": [3, 31, 59]',
        training=Training(target="kimi", convention="output", layer_ids=[2, 30, 58]),
    ),
    Pair(
        "the same, to repeat an old measurement",
        "warns",
        "would take [2, 30, 58]",
        training=Training(target="kimi", convention="output", layer_ids=[2, 30, 58], accept_mismatch=True),
    ),
    Pair(
        "nested ids that vLLM 0.16 does not read",
        "refused",
        "names none that it reads",
        training=Training(target="kimi", convention="output"),
        drafter={"config": nested([2, 30, 58])},
    ),
    Pair(
        "nested output ids that vLLM 0.33 reads as input ids",
        "refused",
        "would take [2, 30, 58]",
        engine=VLLM_NEW,
        training=Training(target="kimi", convention="output"),
        drafter={"config": nested([2, 30, 58])},
    ),
    Pair("unknown convention", "warns", "is not recorded", training=Training(target="kimi")),
    Pair(
        "K2 drafter on K2.5",
        "warns",
        "0.66x of the base",
        training=Training(target="kimi-k2", convention="engine-default"),
    ),
    Pair(
        "short positions on SGLang",
        "warns",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
        engine=SGLANG,
        drafter={"config": {"max_position_embeddings": 4096}},
    ),
    Pair(
        "short positions on vLLM",
        "warns",
        "nothing for sequences beyond 4096",
        drafter={"config": {"max_position_embeddings": 4096}},
    ),
    Pair("weights in F32", "warns", "F32", drafter={"tensors": {"fc.weight": ("F32", (HIDDEN, 3 * HIDDEN))}}),
    Pair(
        "weights in I8",
        "refused",
        "without a quantization_config",
        drafter={"tensors": {"fc.weight": ("I8", (HIDDEN, 3 * HIDDEN))}},
    ),
    Pair(
        "notes that speak of 60 layers",
        "fits",
        "the notes say num_hidden_layers 60, the config says 1",
        training=Training(target="kimi", convention="engine-default", notes={"num_hidden_layers": 60}),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_pairs(pair: Pair, tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi", **pair.target)
    drafter = make_drafter(tmp_path / "drafter", **pair.drafter)
    verdict = fit.check(target, drafter, pair.engine, pair.context, pair.training, known=known(pair.engine))
    text = "\n".join(verdict.lines())
    assert verdict.word == pair.verdict, text
    assert pair.says in text
    if pair.verdict == "refused":
        assert len(verdict.refuse) == pair.refusals, text


MTP_TENSORS = {
    "as DeepSeek and GLM name it": f"model.layers.{LAYERS}.eh_proj.weight",
    "of a multimodal model": f"language_model.model.layers.{LAYERS}.enorm.weight",
    "as Qwen and Nemotron name it": "mtp.fc.weight",
    "as MiMo names it": "model.mtp_layers.0.input_proj.weight",
}


@pytest.mark.parametrize("name", MTP_TENSORS.values(), ids=MTP_TENSORS)
def test_a_head_of_the_targets_own_is_found(name: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi", num_nextn_predict_layers=1)
    body = {f"model.layers.{LAYERS - 1}.input_layernorm.weight": ("BF16", (HIDDEN,))}
    write_tensors(target / "model-1.safetensors", {**body, name: ("BF16", (HIDDEN,))})
    verdict = fit.check_head(target, VLLM_NEW, steps=3)
    assert (verdict.word, verdict.head) == ("fits", 1)
    assert verdict.lines()[0] == "fits: 1 tensors of an MTP head"
    assert "later drafts reuse its last one" in "\n".join(verdict.lines())


@pytest.mark.parametrize(("said", "text"), [({}, "quantisers drop"), ({"num_mtp_modules": 3}, "says 3 layers of it")])
def test_a_head_that_was_dropped_is_refused(said: dict[str, int], text: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi", **said)
    write_tensors(target / "model.safetensors", {f"model.layers.{LAYERS - 1}.mlp.weight": ("BF16", (HIDDEN,))})
    verdict = fit.check_head(target, VLLM_NEW, steps=3)
    assert verdict.word == "refused" and text in verdict.refuse[0]


def test_steps_that_vllm_refuses_are_refused_before(tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi", mtp_num_hidden_layers=2)
    write_tensors(target / "model.safetensors", {"mtp.fc.weight": ("BF16", (HIDDEN,))})
    assert fit.check_head(target, VLLM_NEW, steps=3).refuse == [
        "3 steps are not a multiple of the head's 2 layers, which vLLM refuses"
    ]
    assert not fit.check_head(target, VLLM_NEW, steps=4).refuse
    assert not fit.check_head(target, SGLANG_NEW, steps=3).refuse
    (target / "model.safetensors").write_bytes(b"short")
    assert "too short" in fit.check_head(target, VLLM_NEW, steps=3).refuse[0]


DFLASH = {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 30, 59]}, "block_size": 8}


@pytest.mark.parametrize(
    ("config", "word", "text"),
    [
        ({}, "fits", "captures the inputs of layers [2, 31, 60]"),
        ({"dflash_config": {"target_layer_ids": [1, 61]}}, "refused", "[61] are outside the target's 61 layers"),
        ({"dflash_config": {"target_layer_ids": [1, 30]}}, "refused", "joins 3 layers, target_layer_ids names 2"),
        ({"dflash_config": {"target_layer_ids": "all"}}, "refused", "not a DFlash drafter"),
        ({"dflash_config": None}, "refused", "not a DFlash drafter"),
        ({"block_size": 7}, "warns", "7 steps: a block of 7 tokens"),
        ({"architectures": ["DFlashDraft"]}, "refused", 'did you mean "DFlashDraftModel"'),
    ],
)
def test_a_dflash_drafter(config: dict[str, Any], word: str, text: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi")
    drafter = make_drafter(tmp_path / "d", config={**DFLASH, **config})
    training = Training(target="kimi")
    verdict = fit.check(target, drafter, VLLM_NEW, CONTEXT, training, method="dflash", steps=7, known=known(VLLM_NEW))
    assert (verdict.word, text in "\n".join(verdict.lines())) == (word, True), verdict.lines()


def test_overwrite_variable_is_named_for_the_unit(tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi")
    drafter = make_drafter(tmp_path / "d", config={"max_position_embeddings": 2048})
    verdict = fit.check(target, drafter, SGLANG, CONTEXT, DEFAULT)
    assert verdict.environment == {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert fit.check(target, drafter, SGLANG, 2048, DEFAULT).environment == {}


@pytest.mark.parametrize(
    "engine", [VLLM, VLLM_NEW, SGLANG, SGLANG_NEW], ids=lambda engine: engine.name + engine.version
)
@pytest.mark.parametrize("convention", ["input", "output"])
def test_wanted_keys_make_every_release_capture_what_was_trained(engine: Engine, convention: Convention) -> None:
    trained = trained_input_ids(convention, [2, 30, 58], LAYERS)
    assert trained == ([2, 30, 58] if convention == "input" else [3, 31, 59])
    captured, _ = engine.captures(engine.wanted_keys(trained), LAYERS)
    assert captured == trained


def test_default_ids_are_those_of_the_engines() -> None:
    assert default_ids(61) == [2, 30, 58]
    with pytest.raises(
        RigctlError, match="convention: Input should be 'input', 'output', 'engine-default' or 'unknown'"
    ):
        Training.validated({"convention": "guess"}, "training")
    with pytest.raises(RigctlError, match="not an engine version"):
        Engine("vllm", "newest")
    assert Engine("sglang", "0.5.10.post1").at_least("0.5.10")


def test_overlay_repairs_the_ids_and_leaves_the_checkpoint_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "kimi")
    drafter = make_drafter(tmp_path / "d")
    before = (drafter / "config.json").read_bytes()
    (tmp_path / "training.json").write_text(
        json.dumps({"target": "kimi", "convention": "output", "layer_ids": [2, 30, 58]})
    )
    shared = ["--target", str(target), "--drafter", str(drafter), "--engine", "vllm", "--version", "0.16.0"]
    shared += ["--context", str(CONTEXT), "--training", str(tmp_path / "training.json"), "--json"]
    assert main(["checkpoints", "fit", *shared]) == 1
    place = tmp_path / "overlays" / "d"
    capsys.readouterr()
    assert main(["checkpoints", "overlay", *shared, "--to", str(place)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["changed"] is True and first["verdict"] == "fits" and first["captured"] == [3, 31, 59]
    assert main(["checkpoints", "overlay", *shared, "--to", str(place)]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is False
    assert (drafter / "config.json").read_bytes() == before
    assert (place / "model.safetensors").resolve() == drafter / "model.safetensors"
    with pytest.raises(RigctlError, match="not an overlay of ours"):
        overlay.write(drafter, target, {})


def test_damaged_drafter_is_refused_not_a_traceback(tmp_path: Path) -> None:
    target = make_target(tmp_path / "kimi")
    drafter = make_drafter(tmp_path / "d")
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    verdict = fit.check(target, drafter, VLLM, CONTEXT, DEFAULT)
    assert verdict.word == "refused" and "truncated" in verdict.refuse[0]
    weights.unlink()
    with pytest.raises(RigctlError, match="no safetensors file"):
        fit.check(target, drafter, VLLM, CONTEXT, DEFAULT)
    with pytest.raises(RigctlError, match="is the checkpoint staged"):
        fit.check(target, tmp_path / "absent", VLLM, CONTEXT, DEFAULT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated pairs whose acceptance on a real engine is known (docs/reference/tiny-models.md)."""
    root = tmp_path_factory.mktemp("tiny")
    for kind in ("target-aux", "drafter-aux-wrong", "drafter-aux-right", "drafter-half"):
        assert main(["tiny-model", kind, str(root / kind)]) == 0
    return root


def test_verdict_agrees_with_the_acceptance_that_a_real_engine_showed(tiny: Path, tmp_path: Path) -> None:
    training = Training(target="target-aux", convention="output", layer_ids=[2, 3, 4])

    def verdict(drafter: Path) -> fit.Verdict:
        return fit.check(tiny / "target-aux", drafter, Engine("vllm", "0.32.0"), 1024, training)

    right, wrong = verdict(tiny / "drafter-aux-right"), verdict(tiny / "drafter-aux-wrong")
    assert right.word == "fits" and right.captured == [3, 4, 5]  # 100 % accepted
    assert wrong.word == "refused" and wrong.captured == [2, 3, 4]  # 0 % accepted
    overlay.write(tiny / "drafter-aux-wrong", tmp_path / "overlay", wrong.keys)
    assert verdict(tmp_path / "overlay").word == "fits"
    configs = [
        json.loads((place / "config.json").read_text()) for place in (tmp_path / "overlay", tiny / "drafter-aux-right")
    ]
    assert configs[0] == configs[1]


def test_generated_drafter_with_a_short_vocabulary_fits(tiny: Path) -> None:
    verdict = fit.check(
        tiny / "target-aux",
        tiny / "drafter-half",
        VLLM_NEW,
        1024,
        Training(target="target-aux", convention="engine-default"),
    )
    assert verdict.word == "fits", verdict.lines()


# -- what neither engine survives ---------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WHOLE: dict[str, Shape | None] = {
    "midlayer.self_attn.q_proj.weight": ("BF16", (64, 2 * HIDDEN)),
    "midlayer.self_attn.k_proj.weight": ("BF16", (32, 2 * HIDDEN)),
    "midlayer.self_attn.v_proj.weight": ("BF16", (32, 2 * HIDDEN)),
    "midlayer.self_attn.o_proj.weight": ("BF16", (HIDDEN, 64)),
    "embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
}
ZERO: dict[str, Any] = {"targets": list(range(DRAFT_VOCAB))}


def judged(root: Path, *, engine: Engine = VLLM_NEW, training: Training = DEFAULT, **drafter: Any) -> fit.Verdict:
    if not (root / "kimi").exists():
        make_target(root / "kimi")
    shutil.rmtree(root / "d", ignore_errors=True)
    drafter["config"] = {**HEADS, **drafter.get("config", {})}
    drafter["tensors"] = {**WHOLE, **drafter.get("tensors", {})}
    return fit.check(root / "kimi", make_drafter(root / "d", **drafter), engine, CONTEXT, training, name="kimi")


def test_a_whole_drafter_fits(tmp_path: Path) -> None:
    assert judged(tmp_path).word == "fits"
    assert judged(tmp_path, **ZERO, listed=list(range(DRAFT_VOCAB))).word == "fits"


@pytest.mark.parametrize("engine", [VLLM, VLLM_NEW, SGLANG, SGLANG_NEW])
@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ({**ZERO, "tensors": {"t2d": None}}, "d2t is zero throughout and there is no t2d"),
        ({"config": {"eagle_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state is False"),
        ({"config": {"use_aux_hidden_state": 0}}, "use_aux_hidden_state is 0"),
        ({"config": {KEY: [30, 2, 58]}}, "does not rise"),
        ({"config": {KEY: [2, 30, 30]}}, "does not rise"),
        ({"config": {"eagle_config": {KEY: [58, 30, 2]}}}, "does not rise"),
        ({"config": {KEY: "2,30,58"}}, "must be a list of layer numbers"),
        ({"config": {KEY: ["2", "30", "58"]}}, "must be a list of layer numbers"),
        ({"config": {KEY: 30}}, "must be a list of layer numbers"),
        ({"config": {KEY: [2, True, 58]}}, "must be a list of layer numbers"),
        ({"config": {"eagle_config": {KEY: {"a": 1}}}}, "must be a list of layer numbers"),
        ({"config": {"eagle_config": [1]}}, "eagle_config is [1], must be an object"),
        ({"config": {"torch_dtype": ["bfloat16"]}}, "torch_dtype is ['bfloat16'], must be a name"),
        ({"config": {"dtype": {"a": 1}}}, "dtype is {'a': 1}, must be a name"),
        ({"config": {"architectures": "LlamaForCausalLMEagle3"}}, "must be a list of names"),
        ({"config": {"architectures": {"a": 1}}}, "must be a list of names"),
        ({"config": {"hidden_size": 0}}, "hidden_size is missing"),
        ({"tensors": {"lm_head.weight": ("BF16", (DRAFT_VOCAB, HIDDEN // 2))}}, "lm_head.weight is [128, 32]"),
        ({"tensors": {"lm_head.weight": ("BF16", ())}}, "lm_head has 0 rows"),
        ({"tensors": {"embed_tokens.weight": ("BF16", (VOCAB, 32))}}, "embed_tokens.weight is [512, 32]"),
        ({"tensors": {"embed_tokens.weight": ("BF16", (VOCAB - 1, HIDDEN))}}, "embed_tokens.weight is [511, 64]"),
        ({"tensors": {"midlayer.self_attn.q_proj.weight": ("BF16", (64, HIDDEN))}}, "q_proj.weight is [64, 64]"),
        ({"tensors": {"midlayer.self_attn.q_proj.weight": ("BF16", (48, 2 * HIDDEN))}}, "q_proj.weight is [48, 128]"),
        ({"tensors": {"midlayer.self_attn.v_proj.weight": ("BF16", (64, 2 * HIDDEN))}}, "v_proj.weight is [64, 128]"),
        ({"tensors": {"midlayer.self_attn.o_proj.weight": ("BF16", (HIDDEN, 32))}}, "o_proj.weight is [64, 32]"),
    ],
)
def test_what_neither_engine_survives_is_refused_with_its_reason(
    tmp_path: Path, engine: Engine, drafter: dict[str, Any], says: str
) -> None:
    found = judged(tmp_path, engine=engine, **drafter)
    assert any(says in text for text in found.refuse), found.refuse


def test_recorded_ids_must_rise_and_a_tensor_is_in_one_file(tmp_path: Path) -> None:
    falling = Training(target="kimi", convention="input", layer_ids=[58, 30, 2])
    assert "which do not rise" in judged(tmp_path, training=falling).refuse[0]
    judged(tmp_path)
    shutil.copy(tmp_path / "d" / "model.safetensors", tmp_path / "d" / "z-old.safetensors")
    again = fit.check(tmp_path / "kimi", tmp_path / "d", VLLM, CONTEXT, DEFAULT)
    assert "z-old.safetensors: tensor" in again.refuse[0] and "is in model.safetensors too" in again.refuse[0]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "2", "float16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([KEY, "a"]), inner, max_size=2),
    max_leaves=4,
)
CONFIG_KEYS = [
    *HEADS, KEY, "eagle_config", "use_aux_hidden_state", "architectures", "hidden_size", "target_hidden_size",
    "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_hidden_layers", "torch_dtype", "dtype",
    "text_config", "quantization_config", "transformer_layer_config",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, min_size=1, max_size=3), st.sampled_from([VLLM, SGLANG_NEW]))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_config_is_refused_or_captures_the_trained_layers(
    tmp_path: Path, change: dict[str, Any], engine: Engine
) -> None:
    found = judged(tmp_path, engine=engine, config=change)
    assert found.word == "refused" or found.captured == found.trained == [2, 30, 58]
    if found.word != "refused":
        assert change.get("use_aux_hidden_state", True) in (True, None)
        assert isinstance(change.get("torch_dtype") or "", str)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 16, 32, 64, 128, 192, 512]), max_size=3).map(tuple)


@given(st.sampled_from([*WHOLE, "fc.weight", "lm_head.weight"]), SHAPES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_another_shape_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    right = {**WHOLE, "fc.weight": ("BF16", (HIDDEN, 3 * HIDDEN)), "lm_head.weight": ("BF16", (DRAFT_VOCAB, HIDDEN))}
    found = judged(tmp_path, tensors={name: ("BF16", shape)})
    assert (found.word == "refused") == (("BF16", shape) != right[name])


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_ends_in_no_traceback_and_is_read_as_the_library_reads_it(
    tmp_path: Path, data: st.DataObject
) -> None:
    place = tmp_path / "x.safetensors"
    write_tensors(place, {"a": ("BF16", (2, 2)), "b": ("I64", (3,))})
    content = place.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "whole"]))
    near = [[0, 8], [8, 32], [4, 12], [0, 32], [2, 2], [3], [2, 2, 1], ["2", "2"]]
    likely: dict[str, list[Any]] = {
        "dtype": ["F16", "I16", "F32", "float16", "BF17", "F64"],
        "shape": near,
        "data_offsets": near,
        "whole": near,
    }
    value = data.draw(st.sampled_from(likely[key]) | JSON)
    name = data.draw(st.sampled_from(["a", "b"]))
    if key == "whole":
        header[name] = value
    else:
        header[name][key] = value
    raw = json.dumps(header).encode()
    place.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    try:
        ours = {name: tensor.shape for name, tensor in headers.read(place).items()}
    except BadFile:
        return
    with safetensors.safe_open(place, framework="numpy") as library:
        assert ours == {name: tuple(library.get_slice(name).get_shape()) for name in library.keys()}  # noqa: SIM118
