"""`kimi-rig add-model`: a checkpoint and a serving entry from a model's config.json, marked unproved."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from rig.catalog.entries import (
    Catalog,
    Release,
    forget_catalogs,
    inventory_directory,
    load_catalog,
    recorded_names,
)
from rig.cli.arguments import verb
from rig.host.model_memory import NUMBERS, OWN_CACHES, WORDS
from rig.maintain.release_add import all_or_nothing
from rigctl import engine_registry
from rigctl.checkpoints.hub import client as hub_client
from rigctl.contract.order import nearest
from rigctl.errors import RigctlError
from rigctl.whole_files import write_whole

HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys by which families say how many layers of an MTP head they have (rigctl/checkpoints/fit.py)."""
CARD_BYTES = 0.8 * 97_887 * 2**20
"""Of weights on one RTX PRO 6000: the rest is for the cache. A first guess; the preflight has the account."""
LONGEST = 131_072
"""Tokens that an entry asks for where the model takes more: a full context seldom fits beside the weights."""
REQUESTS = 32


class AddFailed(RigctlError):
    """Nothing was written; the text says why and what to do."""


@dataclass
class Model:
    """What a config.json says, as far as an entry needs it."""

    architecture: str
    shape: dict[str, Any]
    head_layers: int = 0
    remote_code: bool = False
    quantization: str | None = None
    total: int | None = None
    """Bytes of all files, where the hub was asked."""
    unknown: list[str] = field(default_factory=list)
    """What nobody said, in words."""


def read_config(text: str | bytes, where: str) -> Model:
    """The model that a config.json describes. Raises AddFailed, naming `where`, for what is no such file."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AddFailed(f"{where}: not JSON ({error})") from None
    names = content.get("architectures") if isinstance(content, Mapping) else None
    if not (isinstance(names, list) and names and isinstance(names[0], str) and re.fullmatch(r"\w+", names[0])):
        raise AddFailed(f"{where}: it names no architecture (`architectures: [...]`): not a model's config.json")
    inner = content.get("text_config")
    language = {**content, **(inner if isinstance(inner, Mapping) else {})}
    numbers = {
        key: value for key in (*NUMBERS, *HEADS) if type(value := language.get(key)) is int and 0 < value < 2**40
    }
    quantization = content.get("quantization_config", language.get("quantization_config"))
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    model = Model(
        architecture=names[0],
        shape={key: numbers[key] for key in NUMBERS if key in numbers}
        | {key: value for key in WORDS if (value := _words(language.get(key))) is not None},
        head_layers=next((numbers[key] for key in HEADS if key in numbers), 0),
        remote_code=isinstance(content.get("auto_map"), Mapping),
        quantization=method if isinstance(method, str) else None,
    )
    for key in (key for key in OWN_CACHES if language.get(key)):
        model.shape[key] = True
        model.unknown.append(f"memory: {key} means caches of a kind of its own (docs/reference/memory.md)")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if key not in model.shape:
            model.unknown.append(f"{key}: the config has none, so the memory account is not complete (`shape`)")
    return model


def _words(value: Any) -> str | list[str] | None:
    """A text or a list of texts: kinds of layers, types of numbers."""
    listed = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return value if isinstance(value, str) or listed else None


def from_hub(repository: str) -> Model:
    """Ask the hub for the config and the sizes of the files. Raises AddFailed where it cannot be asked."""
    hub = hub_client()
    try:
        with tempfile.TemporaryDirectory(prefix="kimi-rig-model-") as folder:
            path = hub.hf_hub_download(repository, "config.json", local_dir=folder)
            model = read_config(Path(path).read_bytes(), f"{repository}/config.json")
        files = hub.HfApi().model_info(repository, files_metadata=True).siblings or []
    except (OSError, ValueError) as error:  # what huggingface_hub raises for no repository, no file and no network
        why = str(error).partition("\n")[0]
        raise AddFailed(f"{repository}: the hub gives no config ({why}): save it, and name it by CONFIG=file") from None
    model.total = sum(one.size or 0 for one in files) or None
    return model


def knowing(catalog: Catalog, architecture: str) -> list[str]:
    """Releases for cards whose record has the architecture, the newest of vLLM first."""
    found = [
        name
        for name, release in catalog.releases.items()
        if release.accelerator == "cuda" and architecture in (recorded_names(name, "architectures") or ())
    ]
    return sorted(found, key=lambda name: _age(catalog.releases[name]), reverse=True)


def _age(release: Release) -> tuple[bool, list[int]]:
    return release.engine == "vllm", [int(part) for part in re.findall(r"\d+", release.version)]


def choose_release(catalog: Catalog, model: Model, wanted: str | None, env: Path | None) -> str:
    """The release that is to serve a model. Raises AddFailed where it does not know the architecture."""
    if wanted is not None and wanted not in catalog.releases:
        raise AddFailed(f"releases.yaml has no release {wanted}{nearest(wanted, catalog.releases)}")
    able = knowing(catalog, model.architecture)
    chosen = wanted or next(iter(able), None)
    if chosen is None:
        raise AddFailed(
            f"no release of releases.yaml knows the architecture {model.architecture}: `make release-add` adds a newer"
        )
    if env is not None:
        try:
            known = engine_registry.architectures(env, catalog.releases[chosen].engine)
        except RigctlError as error:
            raise AddFailed(str(error)) from None
    else:
        known = recorded_names(chosen, "architectures") or frozenset()
    if model.architecture not in known:
        others = f"; {', '.join(able)} does" if able else ""
        raise AddFailed(f"{chosen} does not know the architecture {model.architecture}{others}")
    return chosen


def entries(
    catalog: Catalog, name: str, repository: str, model: Model, release: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint and the serving entry. What nobody said is added to model.unknown."""
    family = next((one for one, of in catalog.families.items() if model.architecture in of.architectures), None)
    checkpoint: dict[str, Any] = {"role": "target", "title": repository.rpartition("/")[2]}
    checkpoint |= {"family": family} if family else {}
    checkpoint |= {"architecture": model.architecture, "path": f"{{models}}/{name}"}
    checkpoint |= {"source": {"kind": "hub", "repository": repository}}
    checkpoint |= {"bytes": model.total} if model.total else {}
    checkpoint |= {"shape": model.shape} if model.shape else {}
    checkpoint |= {"heads": {"mtp": {"layers": model.head_layers}}} if model.head_layers else {}
    cards = next((n for n in (1, 2, 4) if (model.total or CARD_BYTES * 8) <= n * CARD_BYTES), 8)
    longest = model.shape.get("max_position_embeddings")
    serving: dict[str, Any] = {
        "description": f"{catalog.releases[release].engine} without speculation",
        "unproved": f"written by make add-model on {datetime.now(UTC):%Y-%m-%d}, and not tried",
        "release": release,
        "target": name,
        "gpus": list(range(cards)),
        "tensor_parallel": cards,
        "listen": {"port": _free_port(catalog)},
        "max_running_requests": REQUESTS,
    }
    serving |= {"context_length": min(longest, LONGEST)} if longest and longest >= 256 else {}
    serving |= {"trust_remote_code": True} if model.remote_code else {}
    engine = catalog.releases[release].engine
    serving |= {"flags": {"enable-metrics": True}} if engine == "sglang" else {}
    model.unknown += _unsaid(catalog, model, family, engine)
    return checkpoint, serving


def _unsaid(catalog: Catalog, model: Model, family: str | None, engine: str) -> Iterator[str]:
    if family is None:
        yield "family: no entry of families.yaml has this architecture: which parsers it takes, and whether it thinks"
    elif engine not in catalog.families[family].parsers:
        yield f"parsers: the family {family} names none for {engine}"
    if model.total is None:
        yield "bytes: the hub was not asked: how many cards it needs (8 are written)"
    if model.quantization is None:
        yield "quantization: the config names none: whether the weights are BF16"
    if model.remote_code:
        yield "trust_remote_code: it has code of its own; read it, or leave the key out where the engine has the model"
    if model.head_layers:
        yield (
            f"an MTP head: the config says {model.head_layers} layers of it, the files may have none (quantisers drop "
            "it); `speculation: {method: mtp}` uses it, and its start says whether it is there"
        )
    yield "known traps on these cards: look for the model's name in the engines' issues, and put them into known_bad"


def _free_port(catalog: Catalog) -> int:
    taken = {entry.listen.port for entry in catalog.serving.values()}
    return next(port for port in range(8000, 65536) if port not in taken)


def slug(repository: str) -> str:
    """A name for entries: what a unit and a directory may be called."""
    return re.sub(r"[^a-z0-9._-]+", "-", repository.rpartition("/")[2].lower()).strip("-._")


def add(repository: str, config: Path | None, name: str | None, release: str | None, env: Path | None) -> list[str]:
    """Write both entries; what to tell. Raises AddFailed, CatalogError."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise AddFailed(f"a repository is OWNER/NAME, such as openai/gpt-oss-120b (got {repository!r})")
    catalog, name = load_catalog(), name or slug(repository)
    for section, there in (("checkpoints", catalog.checkpoints), ("serving", catalog.serving)):
        if name in there:
            raise AddFailed(f"{section}.yaml has an entry {name} already: give another by NAME=...")
    try:
        model = read_config(config.read_bytes(), str(config)) if config else from_hub(repository)
    except OSError as error:
        raise AddFailed(f"{config} cannot be read: {error.strerror}") from None
    chosen = choose_release(catalog, model, release, env)
    checkpoint, serving = entries(catalog, name, repository, model, chosen)
    files = {section: inventory_directory() / f"{section}.yaml" for section in ("checkpoints", "serving")}
    with all_or_nothing(*files.values()):
        for section, entry in (("checkpoints", checkpoint), ("serving", serving)):
            block = yaml.safe_dump({name: entry}, sort_keys=False, default_flow_style=None, width=100)
            write_whole(files[section], f"{files[section].read_text().rstrip()}\n\n{block}")
        forget_catalogs()
        load_catalog()
    return [
        f"written: {name} in checkpoints.yaml and serving.yaml, for {chosen}",
        *(f"not known: {one}" for one in model.unknown),
        f"next: read both entries over; `make pin CHECKPOINT={name}`; name it in a host's configurations; `make plan`",
    ]


@verb("add-model", "nothing was written")
@click.argument("repository")
@click.option("--config", type=Path, help="Its config.json, where the hub is not to be asked.")
@click.option("--name", help="Of both entries; default: the repository's, in small letters.")
@click.option("--release", help="That serves it; default: the newest vLLM that knows its architecture.")
@click.option("--env", type=Path, help="The release's environment, whose registry is asked instead of the record.")
def add_model_command(
    repository: str, config: Path | None, name: str | None, release: str | None, env: Path | None
) -> None:
    """Write a checkpoint and a serving entry for REPOSITORY (OWNER/NAME on the hub) from its config.json, as unproved.

    What the config says is checked against what the release registers; what it does not say is named. Nothing is
    fetched but that file. Exit codes: 0 written, 1 not.
    """
    print("\n".join(add(repository, config, name, release, env)))
