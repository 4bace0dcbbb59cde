"""What must hold of its checkpoints before a unit starts an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rigctl.checkpoints import overlay, precheck
from rigctl.cli import main
from rigctl.contract.eagle3_conventions import KEY
from rigctl.contract.served_checkpoints import DrafterPair, DrafterPairs, Training
from rigctl.errors import RigctlError
from rigctl.supervisor.specification import Specification
from tests.unit.serving import checkpoint, drafter, fields, proved, specification


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a proved target and drafter."""
    places = {"target": checkpoint(tmp_path / "target"), "drafter": drafter(tmp_path / "drafter")}
    (places["target"] / "modeling_kimi.py").write_text("print()\n")
    monkeypatch.setenv("RIGCTL_CHECKPOINTS", str(proved(tmp_path / "state", **places)))
    return tmp_path


def of(pair: Path, *, engine: str = "vllm", drafter: str = "drafter", **checkpoints: Any) -> Specification:
    used = {**fields()["checkpoints"], **checkpoints}
    used["training"] = Training.validated(used["training"], "test").model_dump()
    places = {"target_path": str(pair / "target"), "drafter_path": str(pair / drafter)}
    return specification(engine=engine, checkpoints=used, **places)


def test_what_was_proved_is_published(pair: Path) -> None:
    said = precheck.published(of(pair))
    assert "target: 3 files as proved" in said and "drafter: 2 files as proved" in said


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_what_changed_or_was_never_proved_is_not_published(pair: Path, name: str) -> None:
    with (pair / name / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(RigctlError, match=f"{name} in .* is not as it was proved: damaged: model.safetensors"):
        precheck.published(of(pair))
    (pair / "state" / f"{name}.json").unlink()
    with pytest.raises(RigctlError, match=f"{name} has never been proved: deploy again"):
        precheck.published(of(pair))


def test_another_directory_than_the_proved_one_is_not_published(pair: Path) -> None:
    drafter(pair / "other")
    with pytest.raises(RigctlError, match=r"was proved at .*/drafter, the configuration names .*/other"):
        precheck.published(of(pair, drafter="other"))


def test_a_drafter_that_fits_is_told_with_its_layers(pair: Path) -> None:
    assert precheck.fits(of(pair)).startswith("fits: LlamaForCausalLMEagle3, captures the inputs of layers [2, 30, 58]")


def test_a_drafter_that_does_not_fit_is_refused(pair: Path) -> None:
    config = json.loads((pair / "drafter" / "config.json").read_text())
    (pair / "drafter" / "config.json").write_text(json.dumps({**config, "vocab_size": 15}))
    with pytest.raises(RigctlError, match="vocabulary of 15 tokens in the drafter, 16 in the target"):
        precheck.fits(of(pair))


def test_the_overwrite_variable_must_be_the_units(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    monkeypatch.delenv(variable, raising=False)
    long = of(pair, engine="sglang", version="0.5.9", context=8192)
    with pytest.raises(RigctlError, match=f"needs {variable}=1: put it into the environment of serving.drill"):
        precheck.fits(long)
    monkeypatch.setenv(variable, "1")
    assert "max_position_embeddings 4096 is below the context of 8192" in precheck.fits(long)


def test_without_a_context_the_targets_own_counts(pair: Path) -> None:
    assert precheck.fits(of(pair, engine="sglang", version="0.5.9", context=None)).startswith("fits")
    config = json.loads((pair / "target" / "config.json").read_text())
    del config["max_position_embeddings"]
    (pair / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RigctlError, match="set context_length"):
        precheck.fits(of(pair, context=None))


def test_a_drafter_of_another_target_is_warned_of_with_the_measured_consequence(pair: Path) -> None:
    said = precheck.fits(of(pair, training={"target": "kimi-k2", "convention": "unknown"}))
    assert "trained for kimi-k2, used with target" in said and "15 %" in said
    assert "convention this drafter was trained with is not recorded" in said


def test_an_overlay_counts_as_the_drafter_behind_it(pair: Path) -> None:
    trained = {"convention": "output", "layer_ids": [2, 30, 58]}
    with pytest.raises(RigctlError, match=r"trained on the inputs of layers \[3, 31, 59\]"):
        precheck.fits(of(pair, training=trained))
    found = precheck.verdict(of(pair, training=trained), pair / "drafter")
    assert found is not None
    overlay.write(pair / "drafter", pair / "overlay", found.keys)
    through = of(pair, drafter="overlay", training=trained)
    assert precheck.fits(through).startswith("fits")
    assert "drafter: 2 files as proved" in precheck.published(through)


def test_only_code_of_the_manifest_is_trusted(pair: Path) -> None:
    assert precheck.trusted_code(of(pair)) == "none is trusted"
    trusting = of(pair, trust_remote_code=True)
    assert precheck.trusted_code(trusting).startswith("1 Python files")
    # Same size and time: what the quick verification cannot see.
    code = pair / "target" / "modeling_kimi.py"
    code.write_text("exit( )\n"[: code.stat().st_size])
    with pytest.raises(RigctlError, match=r"modeling_kimi.py has sha256:.*, the manifest of target says"):
        precheck.trusted_code(trusting)


def test_code_that_no_manifest_lists_is_not_trusted(pair: Path) -> None:
    (pair / "target" / "configuration_kimi.py").write_text("")
    with pytest.raises(RigctlError, match=r"configuration_kimi\.py is not in the manifest of target"):
        precheck.trusted_code(of(pair, trust_remote_code=True))


def test_an_unknown_key_of_a_training_is_refused() -> None:
    with pytest.raises(RigctlError, match='training: layers: there is no such key, did you mean "layer_ids"'):
        Training.validated({"layers": [1]}, "training")


def pair_of(pair: Path, **more: Any) -> DrafterPair:
    spec = of(pair, **{"engine": "vllm", "drafter": "drafter", **more})
    content = {key: getattr(spec, key) for key in ("name", "engine", "release", "target_path", "drafter_path")}
    content |= {"checkpoint_path": str(pair / "drafter"), "checkpoints": spec.checkpoints}
    return DrafterPair.model_validate(content)


@pytest.mark.parametrize(
    ("engine", "version", "key"),
    [("vllm", "0.16.0", "eagle_aux_hidden_state_layer_ids"), ("sglang", "0.5.9", "eagle_config")],
)
def test_an_overlay_is_written_as_that_release_reads_it(pair: Path, engine: str, version: str, key: str) -> None:
    before = {place: place.read_bytes() for place in (pair / "drafter").iterdir()}
    trained = {"convention": "output", "layer_ids": [2, 30, 58]}
    one = pair_of(pair, engine=engine, version=version, drafter="overlays/x", training=trained)
    planned = precheck.judge(one, write=False)
    assert planned["overlay"] == "absent" and planned["error"] is None and not (pair / "overlays").exists()
    assert planned["verdict"]["captured"] == planned["verdict"]["trained"] == [3, 31, 59]
    assert precheck.judge(one, write=True)["overlay"] == "written"
    assert precheck.judge(one, write=True)["overlay"] == "current"
    config = json.loads((pair / "overlays" / "x" / "config.json").read_text())
    assert config[key] == ([3, 31, 59] if engine == "vllm" else {KEY: [2, 30, 58], "use_aux_hidden_state": True})
    assert before == {place: place.read_bytes() for place in (pair / "drafter").iterdir()}


def test_a_refused_pair_gets_no_overlay_and_the_command_fails(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = {"convention": "output", "layer_ids": [2, 30, 60]}
    order = DrafterPairs(pairs=[pair_of(pair, drafter="overlays/x", training=trained)])
    assert main(["checkpoints", "pairs", "--write", "--json", order.text()]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["overlay"] == "absent" and "the target has 61 layers" in err
    assert not (pair / "overlays").exists()


def test_a_target_with_and_without_a_head_of_its_own(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = pair_of(pair).model_dump()
    one = DrafterPair.model_validate(
        {**content, "method": "mtp", "steps": 3, "drafter_path": None, "checkpoint_path": None}
    )
    assert main(["checkpoints", "pairs", "--json", DrafterPairs(pairs=[one]).text()]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["overlay"] is None and "quantisers drop the head" in err
    assert "mtp for" in err and "name another drafter or method" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "not JSON"),
        ("1", "a JSON object is expected"),
        ("[]", "a JSON object is expected"),
        ('{"pairs": []}', "format 0 is of an old version of kimi-rig and no longer read"),
        ('{"format": 1, "pairs": ["x"]}', "pairs.0: "),
        ('{"format": 1, "pairs": [{"nmae": 1}]}', 'pairs.0.nmae: there is no such key, did you mean "name"'),
        ('{"format": 2, "pairs": []}', "format 2 is newer than this program reads"),
    ],
)
def test_what_is_no_order_of_pairs_is_refused(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "pairs", text]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "1", "{}", '{"path": 1, "lock": 1, "cache": 1}'])
def test_what_is_no_order_for_an_environment_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environment", "build", text]) == 1
    assert "rigctl environment: the order: " in capsys.readouterr().err
