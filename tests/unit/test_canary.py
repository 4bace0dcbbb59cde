"""The quality canary: faulty models are caught, sound ones are not; what it asks, keeps, and says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.artifacts.canary import canary_files
from rig.catalog.canary import GENERAL, canary_prompts
from rig.catalog.entries import ROOT, load_catalog
from rig.catalog.yaml_source import CatalogError
from rigctl import builder
from rigctl.cli import main
from rigctl.contract import layout
from rigctl.contract.canary import Answered, CanaryPrompts, CanaryRun, Prompt, Settings, baseline_place, outcome_place
from rigctl.contract.order import ContractError
from rigctl.errors import RigctlError
from rigctl.services import canary, canary_checks, status
from rigctl.tiny_models import glm, kimi, qwen3
from rigctl.tiny_models.automaton import THOUGHT, TOOL_THOUGHT
from rigctl.tiny_models.checkpoints import Files, checkpoint_files
from rigctl.tiny_models.numbers import Tensors, safetensors_bytes
from rigctl.tiny_models.qwen3 import QWEN3
from tests.support.automaton_engine import AutomatonEngine, tensors
from tests.support.plans import SHIPPED, gpu_plan
from tests.unit.serving import specification
from tests.unit.test_host_commands import Host

PROMPTS = canary_prompts("tiny-qwen3", SHIPPED)
FILES = checkpoint_files("qwen3")


class Served:
    """A configuration that is active, and the model that it serves."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = Host(root, monkeypatch)
        self.files: Files = FILES
        monkeypatch.setattr(canary, "properties", self.host.properties)
        for name in ("CANARY_PROMPTS", "STATE"):
            (root / name.lower()).mkdir()
            monkeypatch.setattr(layout, name, str(root / name.lower()))
        monkeypatch.setattr(layout, "CANARY", f"{layout.STATE}/canary")
        monkeypatch.setattr(canary, "engine_of", lambda found: AutomatonEngine(found, self.files))
        monkeypatch.setattr(builder, "_confined", False)
        self.host.add("qwen", speculation=None)
        self.host.runs("qwen", checkpoints={"target": "revision-1"}, release="vllm-x")
        self.ask(PROMPTS)

    @staticmethod
    def ask(prompts: CanaryPrompts) -> None:
        Path(layout.CANARY_PROMPTS, "target.json").write_text(prompts.text())

    def run(self, *options: str) -> int:
        return main(["canary", "qwen", *options])


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


def changed(**replaced: Any) -> Files:
    """The tiny Qwen3 with other tensors."""
    weights: Tensors = {**tensors(FILES), **replaced}
    return {**FILES, "model.safetensors": safetensors_bytes(weights)}


def zero_norm() -> Files:
    return changed(**{"model.norm.weight": np.zeros(256, np.float32)})


def swapped_words() -> Files:
    """Two rows of the output layer: fluent, and wrong in two words."""
    head = tensors(FILES)["lm_head.weight"].copy()
    one, other = QWEN3.id_of(" paragraph"), QWEN3.id_of(" yardstick:")
    head[[one, other]] = head[[other, one]]
    return changed(**{"lm_head.weight": head})


def swapped_tensors() -> Files:
    found = tensors(FILES)
    return changed(
        **{"lm_head.weight": found["model.embed_tokens.weight"], "model.embed_tokens.weight": found["lm_head.weight"]}
    )


def wrong_template() -> Files:
    template = FILES["chat_template.jinja"].replace(b"<|im_start|>assistant\\n", b"<|im_start|>assistant: ")
    return {**FILES, "chat_template.jinja": template}


FAULTY = {
    "zero norm": (zero_norm, "is degenerate"),
    "swapped words": (swapped_words, "answer is another"),
    "swapped tensors": (swapped_tensors, "answer is another"),
    "wrong template": (wrong_template, "reasoning is another"),
}


def test_the_files_are_the_ones_that_are_served() -> None:
    assert changed() == FILES


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_model_is_caught(served: Served, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = FAULTY[fault]
    assert served.run("--baseline") == 0
    assert served.run() == 0, "the model itself"
    served.files = make()
    served.host.runs("qwen", checkpoints={"target": "revision-1"}, digest="e" * 64)  # a deploy changed a flag
    capsys.readouterr()
    assert served.run() == 1
    shown = capsys.readouterr().out
    assert "canary: worse" in shown and says in shown
    row = status.row(canary.named("qwen"))
    assert row["canary"]["present"] and row["canary"]["verdict"] == "worse"
    assert any(remark.startswith("CANARY WORSE: ") for remark in row["remarks"])
    served.files = FILES
    assert served.run() == 0
    assert not any("CANARY" in remark for remark in status.row(canary.named("qwen"))["remarks"])


@pytest.mark.parametrize("fault", [name for name in FAULTY if name != "wrong template"])
def test_a_faulty_model_makes_no_baseline(served: Served, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    served.files = FAULTY[fault][0]()
    assert served.run("--baseline") == 1
    assert CanaryRun.read(baseline_place("target", "revision-1")) is None
    assert "baseline: worse" in capsys.readouterr().out
    assert served.run() == 64


def test_what_is_kept_says_what_answered(served: Served) -> None:
    assert served.run("--baseline") == 0
    kept = CanaryRun.read(baseline_place("target", "revision-1"))
    assert kept is not None and kept.scores == [1.0, 1.0]
    assert (kept.settings.release, kept.settings.cache, kept.settings.digest) == ("vllm-x", "auto", "d" * 64)
    assert all(one.text for one in kept.answers.values()), "the same in every round"
    assert baseline_place("target", "revision-2").path != baseline_place("target", "revision-1").path


def test_one_round_is_enough_where_nothing_differs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.run("--baseline")
    capsys.readouterr()
    assert served.run("--json") == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["verdict"] == "same"
    assert {len(one["held"]) for one in outcome["run"]["answers"].values()} == {1}


def test_the_long_text_fills_the_context_and_hides_its_sentence(served: Served) -> None:
    engine = AutomatonEngine(specification(speculation=None), FILES)
    prompt = next(one for one in PROMPTS.prompts if one.haystack)
    canary_checks.asked(engine, prompt)  # type: ignore[arg-type]
    asked = engine.asked[-1]
    room = 1024 - 512
    assert 0.75 * room < len(asked) < room and "The word is heron." in asked
    assert 0.25 < asked.index("The word is heron.") / len(asked) < 0.55


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda served: served.host.units.clear(), "is not active"),
        (lambda served: Path(layout.CANARY_PROMPTS, "target.json").unlink(), "deploy again"),
        (lambda served: served.run("--baseline") and None, None),
        (lambda _: None, "there is no baseline"),
    ],
)
def test_wrong_usage_says_nothing_of_the_model(
    served: Served, capsys: pytest.CaptureFixture[str], change: Any, says: str | None
) -> None:
    change(served)
    assert served.run() == (64 if says else 0)
    assert (says or "") in capsys.readouterr().out
    assert (says is None) == (status.row(canary.named("qwen"))["canary"]["verdict"] is not None)


def test_other_prompts_need_another_baseline(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.run("--baseline")
    served.ask(PROMPTS.model_copy(update={"rounds": 5}))
    assert served.run() == 0, "how often it is asked is no other question"
    served.ask(PROMPTS.model_copy(update={"prompts": PROMPTS.prompts[1:]}))
    assert served.run() == 64
    assert "is of other prompts" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["canary"], ["canary", "a", "b"], ["canary", "--nope"]])
def test_the_command_line_is_checked(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 64


def test_an_engine_that_does_not_answer_is_a_failure(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.run("--baseline")
    served.files = {**FILES, "chat_template.jinja": b"{{ '!' * 2000 }}"}
    assert served.run() == 1
    assert "does not answer" in capsys.readouterr().err
    assert status.row(canary.named("qwen"))["canary"]["verdict"] == "same", "the last one that was asked"


def made(held: dict[str, list[bool]], digest: str = "d", texts: dict[str, list[str]] | None = None) -> CanaryRun:
    answers = {
        name: Answered(held=found, texts=(texts or {}).get(name, ["t"] * len(found)), why="x")
        for name, found in held.items()
    }
    made_with = Settings(
        configuration="c", digest=digest, release="r", flags=[], cache="auto", method=None, drafter=None
    )
    return CanaryRun(at=1, target="t", identity="i", prompts="p", settings=made_with, answers=answers)


T, F = True, False


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ({"a": [T, T, T]}, {"a": [T]}, "same"),
        ({"a": [T, T, T], "b": [F, F, F]}, {"a": [T] * 3, "b": [T] * 3}, "better"),
        ({"a": [T, T, T], "b": [T, T, T]}, {"a": [T] * 3, "b": [F] * 3}, "worse"),
        # One that held always holds never, though the score is within the spread.
        ({"a": [T, T, T], "b": [F, T, T]}, {"a": [F] * 3, "b": [T] * 3}, "worse"),
        ({"a": [T, F, T], "b": [T, T, F]}, {"a": [F, T, T], "b": [T, F, T]}, "same"),
        ({"a": [T, F, T], "b": [T, T, F]}, {"a": [F, F, T], "b": [F, F, T]}, "worse"),
    ],
)
def test_scores_are_compared_by_their_spread(
    before: dict[str, list[bool]], now: dict[str, list[bool]], verdict: str
) -> None:
    assert canary.compared(made(now, digest="other"), made(before)).verdict == verdict


def test_equal_settings_give_equal_texts_where_the_engine_is_deterministic() -> None:
    before = made({"a": [T, T]}, texts={"a": ["one", "one"]})
    other = {"a": ["two", "two"]}
    assert canary.compared(made({"a": [T, T]}, texts=other), before).verdict == "worse"
    assert canary.compared(made({"a": [T, T]}, digest="e", texts=other), before).verdict == "same"
    unsteady = made({"a": [T, T]}, texts={"a": ["one", "three"]})
    assert canary.compared(made({"a": [T, T]}, texts=other), unsteady).verdict == "same"


held = st.lists(st.booleans(), min_size=1, max_size=4)


@given(st.dictionaries(st.sampled_from("abc"), held, min_size=1), st.data())
def test_the_same_answers_are_never_worse(found: dict[str, list[bool]], data: st.DataObject) -> None:
    rounds = data.draw(st.integers(1, 4))
    before = made({name: (one * rounds)[:rounds] for name, one in found.items()})
    assert canary.compared(before, before).verdict == "same"


# One answer


ENGINE: Any = AutomatonEngine(specification(speculation=None), FILES)


def faults(answer: str, called: list[tuple[str, str]] | None = None, **checks: Any) -> list[str]:
    prompt = Prompt.model_validate({"name": "x", "ask": "y", **checks})
    return canary_checks.faults(ENGINE, prompt, "", answer, called or [])


@pytest.mark.parametrize(
    ("answer", "checks", "says"),
    [
        ("It is **Canberra**.", {"says": ["canberra"]}, None),
        ("It is Sydney.", {"says": ["Canberra"]}, "does not say 'Canberra': It is Sydney."),
        ("17 times 3 is 1,051.50", {"number": 1051.5}, None),
        ("-12", {"number": -12}, None),
        ("It is 12, or 13", {"number": 12}, "12 was expected"),
        ("None that I know", {"number": 12}, "12 was expected"),
        ("!!!!!!!!!!!!", {"says": ["!"]}, "answer is degenerate"),
        ("", {"says": ["x"]}, "nothing came"),
        ("a\x1b[2Jb", {"says": ["x"]}, r"a\x1b[2Jb"),
    ],
)
def test_words_and_numbers(answer: str, checks: dict[str, Any], says: str | None) -> None:
    found = faults(answer, **checks)
    assert not found if says is None else says in found[0]


TOOL = {"name": "go", "description": "d", "parameters": {"type": "object"}, "arguments": {"city": "Paris", "n": 2}}


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([("go", '{"city": "paris, France", "n": 2, "more": 1}')], None),
        ([], "go was not called"),
        ([("stop", "{}")], "go was expected: stop({})"),
        ([("go", "{")], "go was expected: go({)"),
        ([("go", "[]")], "go was expected"),
        ([("go", '{"city": "Rome", "n": 2}')], "city is 'Rome', not 'Paris'"),
        ([("go", '{"city": "Paris", "n": "2"}')], "n is '2', not 2"),
    ],
)
def test_tool_calls(calls: list[tuple[str, str]], says: str | None) -> None:
    found = faults("", calls, tool=TOOL)
    assert not found if says is None else says in found[0]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("Here:\n```python\ndef f(x):\n    print('talks')\n    return [x, x + 1]\n```\nDone.", None),
        ("```python\nx = 1\n```\nand\n```\ndef f(x): return [x, x + 1]\n```", None),
        ("def f(x): return [x, x + 1]", "no block of code"),
        ("```python\ndef f(x): return x\n```", "f(1) gives 1, not [1, 2]"),
        ("```python\ndef f(x:\n```", "does not run"),
        ("```python\nraise SystemExit\n```", "does not run"),
        ("```python\ndef f(x): return {1}\n```", "are no JSON"),
        ("```python\nimport os\nos.write(1, b'[[1, 2]]')\nos._exit(0)\n```", None),
        ("```python\nimport os\nwhile True: os.write(1, b'x' * 65536)\n```", "does not run"),
    ],
)
def test_code_is_run(monkeypatch: pytest.MonkeyPatch, code: str, says: str | None) -> None:
    monkeypatch.setattr(builder, "_confined", False)
    found = faults(code, calls=[{"call": "f(1)", "gives": [1, 2]}])
    assert not found if says is None else says in found[0]


def test_code_is_never_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its sandbox it is not run at all (tests/sandbox has the sandbox)."""
    monkeypatch.setattr(builder, "_confined", True)
    monkeypatch.setattr(layout, "BUILDER", "no-such-user")
    with pytest.raises(RigctlError, match="root runs nothing that others wrote"):
        faults("```python\ndef f(x): return x\n```", calls=[{"call": "f(1)", "gives": 1}])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=2))
def test_no_answer_is_a_traceback(answer: str, calls: list[tuple[str, str]]) -> None:
    found = faults(answer, calls, says=["\x00heron"], number=4, tool=TOOL)
    assert found and all(one.isprintable() for one in found)


# Prompts as data


@pytest.mark.parametrize("name", [path.stem for path in (SHIPPED / "canary").glob("*.yaml")])
def test_shipped_prompts_are_valid(name: str) -> None:
    assert canary_prompts(name, SHIPPED).prompts


def test_the_general_prompts_ask_for_each_kind() -> None:
    prompts = canary_prompts(GENERAL, SHIPPED).prompts
    kinds = ["says", "number", "calls", "tool", "haystack"]
    assert all(any(getattr(prompt, kind) for prompt in prompts) for kind in kinds)


@pytest.mark.parametrize("name", ["tiny-kimi", "tiny-qwen3", "tiny-glm"])
def test_the_tiny_models_are_asked_for_what_they_say(name: str) -> None:
    module = {"tiny-kimi": kimi, "tiny-qwen3": qwen3, "tiny-glm": glm}[name]
    asked = {prompt.name: prompt for prompt in canary_prompts(name, SHIPPED).prompts}
    for prompt in ("chat", "thinking-off", "long-context"):
        assert asked[prompt].answer == module.CONTENT
    assert asked["chat"].reasoning == asked["long-context"].reasoning == THOUGHT
    tool = asked["weather"].tool
    assert asked["weather"].reasoning == TOOL_THOUGHT and tool and tool.arguments == module.TOOL_ARGUMENTS


def test_a_host_gets_the_prompts_of_its_models() -> None:
    files = canary_files(gpu_plan())
    assert [*files] == ["/etc/kimi-rig/canary/kimi-k2.5-int4.json"]
    found = CanaryPrompts.parse_text(files["/etc/kimi-rig/canary/kimi-k2.5-int4.json"], "x")
    assert found == canary_prompts(GENERAL, SHIPPED)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompts: []", "at least 1 item"),
        ("prompts: [{name: a, ask: b}]", "a prompt has one of"),
        ("prompts: [{name: a, ask: b, sais: [c]}]", 'did you mean "says"'),
        ("prompts: [{name: a, ask: b, number: 1}, {name: a, ask: c, number: 1}]", "two prompts are named a"),
        ("prompts: [{name: a, ask: b, number: one}]", "prompts.0.number"),
        ("rounds: 0\nprompts: [{name: a, ask: b, number: 1}]", "rounds"),
    ],
)
def test_wrong_prompts_are_found_with_the_catalogues(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "mine.yaml").write_text(text)
    with pytest.raises(ContractError, match=rf"inventory/canary/mine.yaml: .*{re.escape(says)}"):
        canary_prompts("mine", tmp_path)
    for name in ("serving", "checkpoints", "releases"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / f"tests/support/inventory/{name}.yaml").read_text())
    (tmp_path / "families.yaml").write_text("odd: {canary: mine}\nmissing: {canary: nowhere}\n")
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, tmp_path)
    assert "families.odd.canary: inventory/canary/mine.yaml" in str(caught.value)
    assert "families.missing.canary: inventory/canary/nowhere.yaml: cannot be read" in str(caught.value)


def test_records_are_read_as_foreign_text(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.run("--baseline")
    Path(outcome_place("qwen").path, "outcome.json").write_text("{")
    assert status.row(canary.named("qwen"))["canary"]["verdict"] is None
    Path(baseline_place("target", "revision-1").path, "baseline.json").write_text("[]")
    assert served.run() == 1
    assert "not a record" in capsys.readouterr().err
