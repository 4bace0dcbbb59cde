"""The verdict on an all-reduce: against what the links allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rig.host.all_reduce_speed import link_speed, verdict
from tests.unit import host_archetypes as hosts

FACTS = hosts.TURIN_DIRECT
NARROW = tuple(replace(card, link_width=8) if card.index == 3 else card for card in FACTS.gpus)


def test_the_narrowest_link_counts() -> None:
    assert link_speed(FACTS, FACTS.gpus) == pytest.approx(63, abs=0.1)
    assert link_speed(FACTS, NARROW) == pytest.approx(31.5, abs=0.1)
    upstream = {address: replace(bridge, link_width=4) for address, bridge in hosts.ESC8000A.bridges.items()}
    assert link_speed(replace(hosts.ESC8000A, bridges=upstream), hosts.ESC8000A.gpus) == pytest.approx(15.75, abs=0.1)
    assert link_speed(FACTS, [replace(FACTS.gpus[0], link_gen_max=None)]) is None


@pytest.mark.parametrize(
    ("output", "p2p", "sound", "words"),
    [
        ("sum ok, 37.6 GB/s", True, True, "37.6 GB/s of 63 that the narrowest link carries: as published"),
        ("sum ok, 22.2 GB/s", True, True, "without tuning"),
        ("sum ok, 2.7 GB/s", True, False, "slow; look at ACS"),
        ("sum ok, 2.7 GB/s", False, True, "through host memory"),
        ("rank 3: wrong sum", True, False, "gave no sum"),
    ],
)
def test_a_verdict_is_in_words(output: str, p2p: bool, sound: bool, words: str) -> None:
    assert verdict(output, FACTS, FACTS.gpus, p2p=p2p)[0] is sound
    assert words in verdict(output, FACTS, FACTS.gpus, p2p=p2p)[1]


def test_of_unknown_links_the_figure_alone_is_said() -> None:
    unknown = [replace(card, link_width=None) for card in FACTS.gpus]
    sound, words = verdict("sum ok, 9.9 GB/s", replace(FACTS, bridges={}), unknown, p2p=True)
    assert sound and "not known" in words
