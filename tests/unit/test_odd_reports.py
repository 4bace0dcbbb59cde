"""A fact report that is broken anywhere: refused in words, or decided on. No fault of a host is its operator's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rig.facts.host import FactsError, parse_host
from rig.host.explanation import explain_json, explain_text
from rig.host.live_settings import reboot_needed, reboot_recommended
from rig.host.nvidia_driver import driver_step
from rig.host.preflight import Needs, preflight
from rig.host.situation import Workload
from rig.host.system_files import host_files
from rig.host.topology import decide

Place = tuple[str | int, ...]
PARTS = st.sampled_from(
    ["-", ",", "0-", "\u00b2", "{1}", "X={1}", "=", ";", "0x", "1e999", "nan", "[", '"', "\x1b[4m", "\n", "GPU0", "N/A"]
)
TEXTS = st.lists(PARTS | st.text(max_size=4), max_size=4).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, SCALARS, max_size=3)


@cache
def report() -> str:
    return (ROOT / "rig/facts/turin-direct.json").read_text()


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    yield here
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from places(below, (*here, key))


PLACES = [*places(json.loads(report()))][1:]
LINES = [
    ("files", "/etc/modprobe.d/a.conf"),
    ("files", "/proc/driver/nvidia/params"),
    ("files", "/proc/cmdline"),
    ("commands", "gpus", "out"),
    ("commands", "topology", "out"),
    ("commands", "p2p_read", "out"),
    ("commands", "compute_apps", "out"),
]
OPTIONS = st.sampled_from(
    [
        'options nvidia NVreg_RegistryDwords="{}"\n',
        'RegistryDwords: "{}"\n',
        "iommu={} amd_iommu=off",
        "iommu.passthrough={}",
    ]
)


@st.composite
def broken(draw: st.DrawFn) -> Any:
    """The recorded report with some of its values replaced, cut out, or with foreign text between their lines."""
    document = copy.deepcopy(json.loads(report()))
    for _ in range(draw(st.integers(1, 4))):
        place: Place = draw(st.sampled_from(PLACES) | st.sampled_from(LINES))
        here: Any = document
        for key in place[:-1]:
            known = range(len(here)) if isinstance(here, list) else here if isinstance(here, dict) else ()
            here = here[key] if key in known else None
        last: Any = place[-1]
        if not (isinstance(here, dict) or (isinstance(here, list) and last in range(len(here)))):
            continue
        old = here.get(last) if isinstance(here, dict) else here[last]
        if isinstance(old, str) or place in LINES:
            lines = str(old or "").splitlines(keepends=True)
            lines.insert(draw(st.integers(0, len(lines))), draw(TEXTS | st.builds(str.format, OPTIONS, TEXTS)))
            here[last] = "".join(lines)
        elif isinstance(here, dict) and draw(st.booleans()):
            here.pop(last, None)
        else:
            here[last] = draw(VALUES)
    return document


@settings(deadline=None, max_examples=60)  # each decides, explains and checks a whole host
@given(broken(), st.sampled_from(["2.27.5", None]), st.sampled_from([(0, 1), None]))
def test_a_broken_report_is_refused_in_words_or_decided_on(
    document: Any, nccl: str | None, gpus: tuple[int, ...] | None
) -> None:
    try:
        facts = parse_host(json.dumps(document))
    except FactsError as error:
        assert len(str(error)) > 20
        return
    for decision in (decide(facts), decide(facts, None, Workload(gpus, None, nccl))):
        host_files(decision.host, facts)
        assert explain_text("host", facts, decision, everything=True)
        json.dumps(explain_json("host", facts, decision))
        assert not [one for one in preflight(facts, decision, Needs()) if not str(one)]
        reboot_needed(decision.settings, facts)
        reboot_recommended(decision.settings, facts)
    driver_step(facts, "580", upgrade=False, in_use=False)


@given(VALUES | st.text(max_size=40))
def test_what_is_no_report_is_refused_in_words(value: Any) -> None:
    for text in (json.dumps(value), value if isinstance(value, str) else ""):
        try:
            parse_host(text)
        except FactsError as error:
            assert "facts" in str(error)
        else:
            raise AssertionError(text)
