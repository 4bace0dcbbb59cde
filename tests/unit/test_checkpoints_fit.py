"""Drafters against their target: a table of pairs with their verdicts, and the overlay that repairs one."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rigctl.checkpoints import fit, overlay
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
    Pair("MLA on vLLM 0.16", "refused", "does not know Eagle3DeepseekV2ForCausalLM", drafter={"mla": True}),
    Pair(
        "MLA on SGLang 0.5.11",
        "refused",
        "does not know",
        engine=Engine("sglang", "0.5.11"),
        drafter={"mla": True},
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
    verdict = fit.check(target, drafter, pair.engine, pair.context, pair.training)
    text = "\n".join(verdict.lines())
    assert verdict.word == pair.verdict, text
    assert pair.says in text
    if pair.verdict == "refused":
        assert len(verdict.refuse) == pair.refusals, text


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
    """The generated pairs whose acceptance on a real engine is known (docs/reference/tiny-kimi.md)."""
    root = tmp_path_factory.mktemp("tiny")
    for kind in ("target-aux", "drafter-aux-wrong", "drafter-aux-right", "drafter-half"):
        assert main(["tiny-kimi", kind, str(root / kind)]) == 0
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
