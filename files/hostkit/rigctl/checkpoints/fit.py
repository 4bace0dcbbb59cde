"""Can a target be served with its method of speculation, on this engine release? From config files, safetensors headers
and the two small vocabulary tables of a drafter; no weights are loaded."""

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rigctl.checkpoints import headers
from rigctl.checkpoints.headers import BadFile, Tensor
from rigctl.checkpoints.overlay import merged
from rigctl.checkpoints.structure import told
from rigctl.contract.eagle3_conventions import KEY, MHA, MISMATCH, MLA, SPECULATORS, Engine, trained_input_ids
from rigctl.contract.order import nearest
from rigctl.contract.served_checkpoints import Training
from rigctl.contract.speculation import Method
from rigctl.errors import RigctlError
from rigctl.whole_files import read_json

LAYER = "midlayer.self_attn"
FLOATS = ("BF16", "F16", "F32")
NEXT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys by which families say how many layers of an MTP head they have (vLLM config/speculative.py, 0.33.0)."""


@dataclass
class Verdict:
    """`refuse` faults mean: no unit may use the pair. `warn` and `note` are shown. `keys`: config keys that
    this release must read for the right layers. `environment`: variables the unit needs."""

    refuse: list[str] = field(default_factory=list)
    warn: list[str] = field(default_factory=list)
    note: list[str] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    trained: list[int] | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    architecture: str = ""
    head: int = 0
    """Tensors of an MTP head in the target's files."""

    @property
    def word(self) -> str:
        """fits, warns or refused."""
        return "refused" if self.refuse else "warns" if self.warn else "fits"

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.word, **vars(self)}

    def lines(self) -> list[str]:
        layers = f", captures the inputs of layers {self.captured}, trained on {self.trained or 'unknown ones'}"
        found = f"{self.architecture}{layers}" if self.architecture else f"{self.head} tensors of an MTP head"
        return (
            [f"{self.word}: {found}"]
            + [f"refuse: {text}" for text in self.refuse]
            + [f"warn: {text}" for text in self.warn]
            + [f"note: {text}" for text in self.note]
            + [f"environment: {name}={value}" for name, value in self.environment.items()]
        )


@dataclass(frozen=True)
class Model:
    """A config (the text part for multimodal ones) and the tensors of the headers."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def number(self, key: str) -> int | None:
        """A positive integer of the config, or None."""
        value = self.config.get(key)
        return value if type(value) is int and value > 0 else None


def read_model(root: Path, *, with_tensors: bool) -> Model:
    """Read a checkpoint's config (and headers); raises RigctlError if there is nothing to read."""
    place = root / "config.json"
    config = read_json(place, "config (is the checkpoint staged?)")
    if not isinstance(config, dict):
        raise RigctlError(f"{place} is not a JSON object")
    for inner in ("text_config", "transformer_layer_config"):
        if isinstance(config.get(inner), dict):
            config = {**config, **config[inner], "architectures": config.get("architectures")}
    tensors: dict[str, Tensor] = {}
    if with_tensors:
        shards = sorted(root.glob("*.safetensors"))
        if not shards:
            raise RigctlError(f"{root} has no safetensors file: convert the drafter's weights first")
        for shard in shards:
            found = headers.read(shard)
            if twice := sorted(tensors.keys() & found.keys()):
                raise BadFile(f"{shard.name}: tensor {twice[0]} is in {tensors[twice[0]].file.name} too")
            tensors |= found
    return Model(config, tensors)


def check_head(target: Path, engine: Engine, steps: int | None) -> Verdict:
    """The verdict on a target that drafts with a head of its own (MTP). steps: drafted tokens a step, where known."""
    verdict = Verdict()
    try:
        main = read_model(target, with_tensors=True)
    except BadFile as error:
        verdict.refuse.append(f"target {error}")
        return verdict
    layers = main.number("num_hidden_layers") or 0
    said = next((number for key in NEXT_LAYERS if (number := main.number(key))), None)
    verdict.head = sum(_of_head(name, layers) for name in main.tensors)
    though = f", though its config.json says {said} layers of it" if said else ""
    lacking = (
        f"no tensor of an MTP head (mtp.*, or layers.{layers} and above) is in {target}{though}: quantisers drop the "
        "head, and then not one draft is accepted"
    )
    uneven = f"{steps} steps are not a multiple of the head's {said} layers, which vLLM refuses"
    verdict.refuse += told(
        (not verdict.head, lacking),
        (engine.name == "vllm" and steps and said and steps > said and steps % said, uneven),
    )
    verdict.note += told(
        (
            steps and said and steps > said,
            f"{steps} steps with a head of {said} layers: later drafts reuse its last one",
        )
    )
    return verdict


def _of_head(tensor: str, layers: int) -> bool:
    """Whether a tensor belongs to an MTP head: one of its own (Qwen, MiMo, Nemotron, DeepSeek-V4), or decoder layers
    beyond the model's (DeepSeek-V3, GLM)."""
    if re.search(r"(^|\.)mtp(_\w+)?\.", tensor):
        return True
    found = re.search(r"(^|\.)layers\.(\d+)\.", tensor)
    return found is not None and layers > 0 and int(found[2]) >= layers


def check(  # noqa: PLR0913 a pair and what it is to be used for
    target: Path,
    drafter: Path,
    engine: Engine,
    context: int,
    training: Training,
    *,
    method: Method = "eagle3",
    steps: int | None = None,
    known: Collection[str] | None = None,
    name: str | None = None,
    written: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict on one pair.

    context: the configuration's maximum model length in tokens. steps: drafted tokens a step, where known. known:
    architectures of the engine's registry; None: none is refused. name: the target's name in the inventory (default:
    its directory's). written: keys that an overlay will put into the drafter's config.
    """
    verdict = Verdict()
    main = read_model(target, with_tensors=False)
    try:
        draft = read_model(drafter, with_tensors=True)
    except BadFile as error:
        verdict.refuse.append(f"drafter {error}")
        return verdict
    draft = replace(draft, config=merged(draft.config, written or {}))
    verdict.refuse += _malformed(draft.config)
    if verdict.refuse:
        return verdict
    _architecture(verdict, draft, engine, known)
    _hidden_size(verdict, main, draft)
    if method == "dflash":
        _block(verdict, main, draft, steps)
    else:
        _attention(verdict, draft, engine)
        _vocabulary(verdict, main, draft, engine)
        _widths(verdict, main, draft)
        _layers(verdict, main, draft, engine, training)
    _dtype(verdict, main, draft)
    _context(verdict, draft, engine, context)
    _provenance(verdict, draft, name or target.name, training)
    return verdict


def _malformed(config: Mapping[str, Any]) -> list[str]:
    """Keys of a drafter's config that have another type, or another value, than both engines take."""
    faults = []
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        return [f"eagle_config is {nested!r}, must be an object"]
    for where, found in (("", config), ("eagle_config.", nested)):
        ids = found.get(KEY)
        if ids is not None and not (isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)):
            faults.append(f"{where}{KEY} is {ids!r}, must be a list of layer numbers")
        elif ids and not rising(ids):
            faults.append(f"{where}{KEY} {ids} does not rise: fc.weight would get the layers in another order")
        if found.get("use_aux_hidden_state", True) is not True:
            faults.append(
                f"{where}use_aux_hidden_state is {found['use_aux_hidden_state']!r}: the engine would give fc.weight "
                "the last layer alone; an EAGLE-3 drafter needs true"
            )
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        faults.append(f"architectures is {names!r}, must be a list of names")
    for key in ("torch_dtype", "dtype"):
        if not isinstance(config.get(key) or "", str):
            faults.append(f"{key} is {config[key]!r}, must be a name such as bfloat16")
    return faults


def rising(ids: Sequence[int]) -> bool:
    """Whether each number is greater than the one before it."""
    return all(one < other for one, other in itertools.pairwise(ids))


def _widths(verdict: Verdict, main: Model, draft: Model) -> None:
    """Shapes of the first layer, the embedding and the head, as the config gives them; packed weights have others."""
    own, whole, heads = draft.number("hidden_size"), main.number("vocab_size"), draft.number("num_attention_heads")
    if own is None or draft.config.get("quantization_config"):
        return
    wanted: dict[str, tuple[int | None, int]] = {"lm_head.weight": (None, own), "embed_tokens.weight": (whole, own)}
    if heads and verdict.architecture in MHA:
        each = draft.number("head_dim") or own // heads
        keys = (draft.number("num_key_value_heads") or heads) * each
        rows = {"q": heads * each, "k": keys, "v": keys}
        wanted |= {f"{LAYER}.{name}_proj.weight": (size, 2 * own) for name, size in rows.items()}
        wanted[f"{LAYER}.o_proj.weight"] = (own, heads * each)
    found = [
        (name, tensor.shape, size)
        for suffix, size in wanted.items()
        for name, tensor in draft.tensors.items()
        if f".{name.replace('layers.0', 'midlayer')}".endswith(f".{suffix}")
    ]
    verdict.refuse += [
        f"{name} is {list(shape)}, config.json makes it [{height or 'rows'}, {width}]: weights and config are "
        "not of one drafter"
        for name, shape, (height, width) in found
        if len(shape) != 2 or shape[1] != width or height not in (None, shape[0])
    ]


def _architecture(verdict: Verdict, draft: Model, engine: Engine, known: Collection[str] | None) -> None:
    """The engine's registry has the drafter's class; of the speculators format vLLM itself makes another of it."""
    names = draft.config.get("architectures") or [""]
    verdict.architecture = name = names[0]
    if not name:
        verdict.refuse.append("the drafter's config.json names no architecture")
    elif known is not None and name not in known and not (engine.name == "vllm" and name in SPECULATORS):
        hint = "; export it as LlamaForCausalLMEagle3 (SpecForge#231)" if name in SPECULATORS else nearest(name, known)
        verdict.refuse.append(f"{engine.name} {engine.version} does not know the architecture {name}{hint}")


def _block(verdict: Verdict, main: Model, draft: Model, steps: int | None) -> None:
    """DFlash: which layers' outputs fc.weight joins, how many tokens a block has (SGLang 0.5.23, dflash_utils.py)."""
    nested = draft.config.get("dflash_config")
    of = {**draft.config, **(nested if isinstance(nested, Mapping) else {})}
    ids, block, count = of.get("target_layer_ids"), of.get("block_size"), main.number("num_hidden_layers")
    shape, hidden = _shape(draft, "fc.weight") or (), main.number("hidden_size")
    if not (isinstance(ids, list) and ids and all(type(one) is int for one in ids)):
        verdict.refuse.append(f"target_layer_ids is {ids!r}, must be a list of layer numbers: not a DFlash drafter")
        return
    outside = [one for one in ids if not 0 <= one < (count or one + 1)]
    joined = shape[1] // hidden if len(shape) == 2 and hidden else len(ids)
    verdict.captured = [one + 1 for one in ids]  # it numbers outputs
    verdict.refuse += told(
        (outside, f"target_layer_ids {outside} are outside the target's {count} layers"),
        (joined != len(ids), f"fc.weight joins {joined} layers, target_layer_ids names {len(ids)}"),
    )
    longer = type(block) is int and steps is not None and steps >= block
    verdict.warn += told((longer, f"{steps} steps: a block of {block} tokens has {block}, the first of them known"))


def _attention(verdict: Verdict, draft: Model, engine: Engine) -> None:
    name = verdict.architecture
    is_mla = any("kv_a_proj" in tensor for tensor in draft.tensors)
    verdict.refuse += told(
        (name in MHA and is_mla, f"{name} is a plain-attention drafter, but its weights are MLA (kv_a_proj)"),
        (name in MLA and not is_mla, f"{name} is an MLA drafter, but its weights have no kv_a_proj"),
    )
    backend = "a plain-attention drafter on an MLA target needs an attention backend of its own"
    verdict.note += told((name in MHA and engine.name == "vllm", backend))


def _shape(draft: Model, suffix: str) -> tuple[int, ...] | None:
    """Shape of the tensor whose name ends with `suffix` (a prefix such as `model.` may come before)."""
    tensor = _find(draft, suffix)
    return tensor.shape if tensor is not None else None


def _hidden_size(verdict: Verdict, main: Model, draft: Model) -> None:
    hidden, own = main.number("hidden_size"), draft.number("hidden_size")
    fused = draft.number("target_hidden_size") or own
    if hidden is None or own is None:
        verdict.refuse.append("hidden_size is missing in the target's or the drafter's config.json")
        return
    shape = _shape(draft, "fc.weight")
    misshapen = shape is not None and (len(shape) != 2 or shape[0] != own or shape[1] % hidden)
    verdict.refuse += told(
        (fused != hidden, f"hidden size {fused} of the drafter's input, {hidden} of the target"),
        (shape is None, "no tensor fc.weight: no drafter that reads the target's hidden states"),
        (misshapen, f"fc.weight {list(shape or ())} does not join layers of {hidden} into {own}"),
    )


def _find(draft: Model, *suffixes: str) -> Tensor | None:
    ends = tuple(f".{suffix}" for suffix in suffixes)
    return next((tensor for name, tensor in draft.tensors.items() if f".{name}".endswith(ends)), None)


def _vocabulary(verdict: Verdict, main: Model, draft: Model, engine: Engine) -> None:
    whole = main.number("vocab_size")
    own = draft.number("vocab_size") or draft.number("target_vocab_size")
    small = draft.number("draft_vocab_size") or own
    if whole is None or small is None:
        verdict.refuse.append("vocab_size is missing in the target's or the drafter's config.json")
        return
    head, rows = _shape(draft, "lm_head.weight"), (_shape(draft, "lm_head.weight") or (0,))[0]
    faults = told(
        (
            own not in (None, whole),
            f"vocabulary of {own} tokens in the drafter, {whole} in the target: another tokenizer",
        ),
        (small > whole, f"draft vocabulary {small} is larger than the target's {whole}"),
    )
    verdict.refuse += faults[:1]
    if faults:
        return
    verdict.refuse += told(
        (head is not None and rows != small, f"lm_head has {rows} rows, draft_vocab_size is {small}"),
        (
            head is None and small < whole,
            f"no lm_head for a draft vocabulary of {small}: the target's has {whole} rows",
        ),
    )
    _tables(verdict, draft, engine, whole, small)


def _tables(verdict: Verdict, draft: Model, engine: Engine, whole: int, small: int) -> None:
    d2t, t2d = _find(draft, "d2t", "draft_id_to_target_id"), _find(draft, "t2d")
    if small == whole:
        if d2t is not None and engine.name == "vllm":
            verdict.refuse.append("d2t with a full vocabulary: vLLM has no parameter to load it into, remove it")
        return
    if d2t is None:
        verdict.refuse.append(f"draft vocabulary of {small} without d2t: drafted ids cannot be mapped to the target")
        return
    try:
        targets = [offset + index for index, offset in enumerate(headers.read_table(d2t, "I64"))]
        listed = headers.read_table(t2d, "BOOL") if t2d is not None else None
    except BadFile as error:
        verdict.refuse.append(str(error))
        return
    low, high, chosen = min(targets, default=0), max(targets, default=0), set(targets)
    faults = told(
        (len(targets) != small, f"d2t has {len(targets)} entries, draft_vocab_size is {small}"),
        (low < 0 or high >= whole, f"d2t leads to tokens {low}..{high}, the target has 0..{whole - 1}"),
        (len(chosen) != len(targets), "d2t maps two drafted ids to one token"),
        (
            listed is None and targets == list(range(small)),
            f"d2t is zero throughout and there is no t2d: drafted ids would mean the first {small} tokens; the table "
            "was not filled when the drafter was exported",
        ),
    )
    if listed is not None and (
        len(listed) != whole or {token for token, is_in in enumerate(listed) if is_in} != chosen
    ):
        faults.append(f"t2d ({len(listed)} entries, {sum(listed)} set) and d2t do not describe one vocabulary")
    verdict.refuse += faults[:1]


def _layers(verdict: Verdict, main: Model, draft: Model, engine: Engine, training: Training) -> None:
    count = main.number("num_hidden_layers")
    if count is None:
        verdict.refuse.append("num_hidden_layers is missing in the target's config.json")
        return
    verdict.captured, why = engine.captures(draft.config, count)
    shape, hidden = _shape(draft, "fc.weight") or (), main.number("hidden_size")
    joined = shape[1] // hidden if len(shape) == 2 and hidden and shape[1] % hidden == 0 else None
    given = len(set(verdict.captured))
    outside = [layer for layer in verdict.captured if not 0 <= layer < count]
    dies = (
        f"fc.weight joins {joined} layers, {engine.name} will give {given} ({why}): it would die at the first request"
    )
    verdict.refuse += told(
        (joined not in (None, given), dies),
        (outside, f"layer ids {outside} are outside the target's {count} layers ({why})"),
    )
    _conventions(verdict, draft, engine, training, count=count, why=why)


def _conventions(  # noqa: PLR0913 the facts that decide
    verdict: Verdict, draft: Model, engine: Engine, training: Training, *, count: int, why: str
) -> None:
    ids = training.layer_ids or draft.config.get(KEY) or (draft.config.get("eagle_config") or {}).get(KEY)
    if ids and not rising(ids):
        verdict.refuse.append(f"trained with layer ids {ids}, which do not rise: correct layer_ids in checkpoints.yaml")
        return
    verdict.trained = trained_input_ids(training.convention, ids, count)
    if verdict.trained is None:
        verdict.warn.append(
            f"the layer id convention this drafter was trained with is not recorded; {engine.name} takes the "
            f"inputs of layers {verdict.captured} ({why}): acceptance that is low already at the first "
            "position means they are one off"
        )
        return
    if any(not 0 <= layer < count for layer in verdict.trained):
        verdict.refuse.append(f"trained on inputs {verdict.trained}, the target has {count} layers")
        return
    verdict.keys = engine.wanted_keys(verdict.trained)
    if verdict.trained != verdict.captured:
        faults = verdict.warn if training.accept_mismatch else verdict.refuse
        faults.append(
            f"trained on the inputs of layers {verdict.trained}, {engine.name} {engine.version} would take "
            f"{verdict.captured} ({why}): write {json.dumps(verdict.keys)} "
            "into its config (rigctl checkpoints overlay does, beside the checkpoint)"
        )


def _dtype(verdict: Verdict, main: Model, draft: Model) -> None:
    found = sorted({tensor.dtype for tensor in draft.tensors.values()} - {"I64", "BOOL", "I32"})
    strange = [dtype for dtype in found if dtype not in FLOATS]
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    written = str(draft.config.get("torch_dtype") or draft.config.get("dtype") or "")
    wanted = main.config.get("torch_dtype") or main.config.get("dtype") or written
    unsaid = strange and not draft.config.get("quantization_config")
    verdict.refuse += told((unsaid, f"weights in {', '.join(strange)} without a quantization_config"))
    verdict.warn += told(
        (len(found) > 1 and not strange, f"weights in {' and '.join(found)}: one of them was saved by mistake"),
        ("F32" in found, "weights in F32: twice the memory and reading of BF16"),
        (
            written in names and found and names[written] not in found,
            f"config.json says {written}, the weights are {', '.join(found)}",
        ),
        (written and written != wanted, f"the drafter is {written}, the target {wanted}"),
    )


def _context(verdict: Verdict, draft: Model, engine: Engine, context: int) -> None:
    longest = draft.number("max_position_embeddings")
    if longest is None:
        verdict.warn.append("max_position_embeddings is missing in the drafter's config.json")
        return
    if longest >= context:
        return
    variable = engine.overwrite_variable()
    effect = f"{engine.name} drafts nothing for sequences beyond {longest} tokens"
    if variable:
        verdict.environment[variable] = "1"
        effect = f"{engine.name} starts only with {variable}=1, and drafts beyond position {longest} are extrapolated"
    verdict.warn.append(f"max_position_embeddings {longest} is below the context of {context}: {effect}")


def _provenance(verdict: Verdict, draft: Model, target: str, training: Training) -> None:
    other = training.target not in (None, target)
    verdict.warn += told((other, f"trained for {training.target}, used with {target}; {MISMATCH}"))
    own, present = draft.number("num_hidden_layers"), _layer_count(draft)
    notes = [(key, said, draft.config.get(key, said)) for key, said in sorted(training.notes.items())]
    verdict.note += told(
        *((found != said, f"the notes say {key} {said}, the config says {found}") for key, said, found in notes),
        (present and own not in (None, present), f"config.json says {own} layers, the weights have {present}"),
    )


def _layer_count(draft: Model) -> int:
    """Decoder layers in the weights: `midlayer` is one, `layers.N` count by N."""
    found = (re.search(r"(^|\.)(midlayer|layers\.[^.]+)", name) for name in draft.tensors)
    return len({match[2] for match in found if match})
