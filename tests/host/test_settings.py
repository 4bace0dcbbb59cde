"""The host runs with the settings chosen for it: kernel, modules, ACS, cards, P2P. Judged by live values."""

from __future__ import annotations

import shlex

import pytest

from rig.artifacts.host_checks import findings, running_configurations
from rig.artifacts.units import engine_environment
from rig.catalog.entries import ROOT
from rig.host.all_reduce_speed import verdict
from rig.host.live_settings import Standing, reboot_recommended, standing
from rig.host.preflight import Severity
from rig.host.system_files import host_files
from rig.operations.host_settings import entries
from rigctl import builder
from tests.host.conftest import Target
from tests.host.test_host import differences

ALL_REDUCE = ROOT / "files/host/all_reduce.py"
ALL_REDUCE_SECONDS = 180


@pytest.fixture
def cards(target: Target) -> Target:
    """The target, where it has GPUs."""
    if not target.plan.facts.gpus:
        pytest.skip("no GPU")
    return target


def test_host_files(target: Target) -> None:
    assert not differences(target, entries(host_files(target.plan.settings, target.plan.facts)))


def test_settings_are_live(target: Target) -> None:
    facts = target.plan.facts
    later = reboot_recommended(target.plan.decision.settings, facts)
    off = {
        one.key: standing(one, facts).value
        for one in target.plan.decision.settings
        if one not in later and standing(one, facts) in (Standing.PENDING, Standing.STAGED)
    }
    assert not off, f"not as chosen: {off}"


def test_preflight_has_no_errors(target: Target) -> None:
    errors = [str(one) for one in findings(target.plan) if one.severity is Severity.ERROR]
    assert not errors, "\n".join(errors)


def test_cards_have_their_memory_on_the_bus(cards: Target) -> None:
    facts = cards.plan.facts
    assert facts.driver.smi_error is None
    small = [gpu.address for gpu in facts.gpus if (gpu.bar1_bytes or 0) < (gpu.memory_mib or 0) << 20]
    assert not small, f"BAR1 is smaller than the card: {', '.join(small)}"


def test_no_bridge_redirects_peer_traffic(cards: Target) -> None:
    redirecting = [one.address for one in cards.plan.facts.bridges.values() if one.redirects]
    assert not redirecting, f"ACS redirects on {', '.join(redirecting)}"


def test_the_driver_allows_p2p(cards: Target) -> None:
    if len(cards.plan.facts.gpus) < 2:
        pytest.skip("one GPU")
    refused = {word for row in cards.plan.facts.p2p or () for word in row} - {"X", "OK"}
    assert cards.plan.facts.p2p is not None
    assert not refused, f"the driver says {', '.join(sorted(refused))}"


def test_an_all_reduce_ends(cards: Target) -> None:
    """NCCL with the units' environment; a P2P dead-lock shows as the time limit."""
    plan = cards.plan
    if running := running_configurations(plan):
        pytest.skip(f"{', '.join(running)} has the cards")
    configuration = max(plan.serving.values(), key=lambda one: len(one.gpus), default=None)
    if configuration is None or len(configuration.gpus) < 2:
        pytest.skip("no configuration with several GPUs")
    interpreter = plan.environments[configuration.release].interpreter
    variables = " ".join(shlex.quote(f"{k}={v}") for k, v in engine_environment(plan, configuration).items())
    limits = ("LimitMEMLOCK=infinity", "LimitNOFILE=1048576")
    sandbox = " ".join(shlex.quote(f"--property={one}") for one in (*builder.SANDBOX, *limits))
    command = f"systemd-run --quiet --wait --pipe --collect {sandbox} -- "
    command += f"env {variables} timeout -k 5 {ALL_REDUCE_SECONDS} {interpreter} - {len(configuration.gpus)} nccl"
    result = cards.host.run(f"{command} <<'ALL_REDUCE'\n{ALL_REDUCE.read_text()}\nALL_REDUCE")
    assert result.rc != 124, f"no end within {ALL_REDUCE_SECONDS} s: P2P dead-lock (IOMMU, ACS, HMM)"
    assert "sum ok" in result.stdout, result.stderr[-2000:]
    cards_of = [card for card in plan.decision.cards if card.index in configuration.gpus]
    p2p = "NCCL_P2P_DISABLE" not in engine_environment(plan, configuration)
    sound, words = verdict(result.stdout, plan.facts, cards_of, p2p=p2p)
    print(words)
    assert sound, words
