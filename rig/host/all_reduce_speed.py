"""Is an all-reduce as fast as the links allow? Pure.

Bus bandwidth (nccl-tests' measure) cannot exceed what one card's narrowest link carries. Published on PCIe gen 5 x16
(63 GB/s) for 32 MB: 22.2 GB/s untuned on two EPYC Turin, 30.3 untuned and 39.3 tuned behind switches, 37.6 and 41.1
tuned on 8 cards (local-inference-lab/rtx6kpro optimization/nccl-tuning.md and
hardware/asus-esc8000a-e13p-broadcom-switches.md; what is asked of a verdict: local-inference-lab/rtx6kpro#25).
"""

import re
from collections.abc import Iterable

from rig.facts.host import Bridge, Gpu, HostFacts

LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction, by PCIe generation."""
SLOW, TUNED = 1 / 3, 1 / 2
"""Shares of the link: below the first something is wrong, from the second on it is as fast as published."""


def link_speed(facts: HostFacts, cards: Iterable[Gpu]) -> float | None:
    """GB/s of the narrowest link below the CPU that a card's traffic takes; None where links are not known."""
    found = []
    for card in cards:
        lane = LANE.get(card.link_gen_max or 0)
        above: list[Bridge] = [facts.bridges[address] for address in card.bridges if address in facts.bridges]
        widths = [card.link_width, *(bridge.link_width for bridge in above)]
        known = [width for width in widths if width]
        if lane is None or not known:
            return None
        found.append(lane * min(known))
    return min(found, default=None)


def verdict(output: str, facts: HostFacts, cards: Iterable[Gpu], *, p2p: bool) -> tuple[bool, str]:
    """Whether what files/host/all_reduce.py printed is sound, and in words. p2p: NCCL may use it."""
    found = re.search(r"sum ok, (\d+(?:\.\d+)?) GB/s", output)
    if found is None:
        return False, "the all-reduce gave no sum"
    speed, link = float(found[1]), link_speed(facts, cards)
    if link is None:
        return True, f"{speed:.1f} GB/s; what the links allow is not known"
    share = f"{speed:.1f} GB/s of {link:.0f} that the narrowest link carries"
    if not p2p:
        return True, f"{share}; through host memory, for which no figure is published"
    if speed < SLOW * link:
        return False, f"{share}: slow; look at ACS, link width and speed under load, NCCL_P2P_LEVEL, NCCL_ALGO"
    return True, f"{share}: {'as published' if speed >= TUNED * link else 'as published without tuning'}"
