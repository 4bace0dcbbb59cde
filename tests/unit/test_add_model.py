"""`make add-model`: entries from a config.json, and what is said where it lacks something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.__main__ import main as kimi_rig
from rig.artifacts.host_checks import findings
from rig.catalog.entries import Checkpoint, Configuration, load_catalog
from rig.maintain import add_model
from rig.maintain.add_model import AddFailed, add, choose_release, entries, read_config
from tests.support.plans import catalog
from tests.unit.test_families import copied, planned

QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "quantization_config": {"quant_method": "modelopt"},
    "text_config": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
    },
}
FAMILY = """
qwen:
  architectures: [Qwen3_5ForConditionalGeneration]
  parsers:
    vllm: {tool: qwen3_coder, reasoning: qwen3}
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = copied(tmp_path)
    (place / "families.yaml").write_text(FAMILY)
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(place))
    return place


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return path


def test_entries_are_written_and_come_to_a_plan(
    inventory: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (inventory / "serving.yaml").read_text()
    assert kimi_rig(["add-model", "nvidia/Qwen3.6-27B-NVFP4", f"--config={config}"]) == 0
    said = capsys.readouterr().out
    assert "written: qwen3.6-27b-nvfp4 in checkpoints.yaml and serving.yaml, for vllm-0.33.0" in said
    for unknown in (
        "bytes: the hub was not asked",
        "an MTP head: the config says 1 layers",
        "known traps on these cards",
    ):
        assert f"not known: {unknown}" in said
    assert (inventory / "serving.yaml").read_text().startswith(before.rstrip()), "comments and entries of others stay"
    written = load_catalog()
    entry, model = written.serving["qwen3.6-27b-nvfp4"], written.checkpoints["qwen3.6-27b-nvfp4"]
    assert (entry.tool_call_parser, entry.reasoning_parser) == ("qwen3_coder", "qwen3")
    assert (entry.context_length, entry.listen.port, entry.speculation) == (131072, 8001, None)
    assert (model.called("x"), model.family, model.shape["head_dim"]) == ("Qwen3.6-27B-NVFP4", "qwen", 256)
    assert model.heads.mtp is not None
    # Nobody who did not name it gets it, and a deploy refuses it until it is pinned.
    assert "qwen3.6-27b-nvfp4" not in planned().serving
    refused = [str(one) for one in findings(planned(configurations=["qwen3.6-27b-nvfp4"])) if one.severity == "error"]
    assert any("`make pin CHECKPOINT=qwen3.6-27b-nvfp4`" in one for one in refused), refused


def test_the_hub_is_asked_where_no_file_is_named(
    inventory: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        @staticmethod
        def hf_hub_download(repository: str, name: str, local_dir: str) -> str:
            assert (repository, name) == ("nvidia/Qwen3.6-27B-NVFP4", "config.json")
            return str(config)

        class HfApi:
            def model_info(self, repository: str, files_metadata: bool) -> Any:
                file = type("File", (), {"size": 11_000_000_000})
                return type("Info", (), {"siblings": [file, file, type("Dir", (), {"size": None})]})

    monkeypatch.setattr(add_model, "hub_client", lambda: Hub)
    said = add("nvidia/Qwen3.6-27B-NVFP4", None, "qwen", None, None)
    assert not any("bytes" in line for line in said)
    assert load_catalog().checkpoints["qwen"].bytes == 22_000_000_000
    assert load_catalog().serving["qwen"].gpus == [0]

    def absent(*_: Any, **__: Any) -> str:
        raise OSError("401 Client Error\nmore")

    monkeypatch.setattr(Hub, "hf_hub_download", staticmethod(absent))
    with pytest.raises(
        AddFailed, match=r"the hub gives no config \(401 Client Error\): save it, and name it by CONFIG"
    ):
        add("a/b", None, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a/b", "--release=vllm-0.16.0"],
            "vllm-0.16.0 does not know the architecture Qwen3_5ForConditionalGeneration; vllm-0.33.0",
        ),
        (["a/b", "--release=vllm-0.16"], 'releases.yaml has no release vllm-0.16, did you mean "vllm-0.16.0"?'),
        (["a/b", "--name=kimi-k2.5-int4"], "checkpoints.yaml has an entry kimi-k2.5-int4 already"),
        (["a/b", "--name=vllm-base"], "serving.yaml has an entry vllm-base already"),
        (["a/b", "--name=A"], "a name is lower-case letters"),
        (["ab"], "a repository is OWNER/NAME"),
        (["a/b", "--env=/nonexistent"], "/nonexistent: no architectures are found"),
    ],
)
def test_what_cannot_be_written_leaves_the_files_alone(
    inventory: Path, config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in inventory.glob("*.yaml")}
    assert kimi_rig(["add-model", *arguments, f"--config={config}"]) == 1
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in inventory.glob("*.yaml")} == before


def test_an_architecture_that_no_release_knows(inventory: Path, config: Path) -> None:
    config.write_text(json.dumps({**QWEN, "architectures": ["NopeForCausalLM"]}))
    with pytest.raises(AddFailed, match=r"no release of releases\.yaml knows the architecture NopeForCausalLM"):
        add("a/b", config, None, None, None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"architectures": []}', '{"architectures": [5]}', "[" * 5000, '{"architectures": ["a b"]}'],
)
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(AddFailed, match=r"^x: "):
        read_config(text, "x")


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats() | st.text(max_size=8) | st.just("NaN"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
PLACES = [*((key,) for key in QWEN), *(("text_config", key) for key in QWEN["text_config"]), ("auto_map",)]


CATALOG = catalog()


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(PLACES), value=VALUES, gone=st.booleans())
def test_whatever_a_config_says_is_refused_or_comes_to_valid_entries(
    place: tuple[str, ...], value: Any, gone: bool
) -> None:
    content: dict[str, Any] = json.loads(json.dumps(QWEN))
    part = content if len(place) == 1 else content[place[0]]
    part[place[-1]] = value
    if gone:
        del part[place[-1]]
    try:
        model = read_config(json.dumps(content), "x/config.json")
        release = choose_release(CATALOG, model, None, None)
    except AddFailed as error:
        assert "x/config.json" in str(error) or "architecture" in str(error)
        return
    checkpoint, serving = entries(CATALOG, "model", "owner/model", model, release)
    # As the YAML file will have them.
    Checkpoint.model_validate(yaml.safe_load(yaml.safe_dump(checkpoint)))
    Configuration.model_validate(yaml.safe_load(yaml.safe_dump(serving)))
    assert all(model.unknown)
