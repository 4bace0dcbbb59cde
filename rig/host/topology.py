"""Topology policy: a host's facts in, its settings out, each with reason, evidence and confidence. Pure.

The rules are in rig/host/rules.py. They are asked in stages: what the host gets, whether its cards reach each other
then, and the settings of NCCL and the engines. The first is about the host, the others about one configuration's cards.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rig.facts.host import Gpu, HostFacts
from rig.host import rules
from rig.host.evidence import Report, authors, reports
from rig.host.live_settings import Standing, standing
from rig.host.rules import Rule
from rig.host.settings import Confidence, HostSettings, Kind, Setting, host_settings
from rig.host.situation import Situation, Workload
from rig.host.system_files import MODPROBE
from rigctl.contract.comparison import same_value

STAGES: tuple[tuple[Rule, ...], ...] = (rules.IOMMU, rules.HOST, rules.PEER_TO_PEER, rules.ENGINE)
OF_THE_HOST = (rules.IOMMU, rules.HOST)
OUTSIDE = (Kind.KERNEL_ARGUMENT, Kind.MODULE_OPTION, Kind.BOOT_UNIT, Kind.SYSCTL, Kind.GOVERNOR, Kind.DISK_SCHEDULER)
"""What a container cannot set: it belongs to the host outside."""

REFUSED_ATTENTION: Mapping[str, Mapping[str, str]] = {
    "sglang": dict.fromkeys(
        ("trtllm_mla", "cutlass_mla", "flashmla", "fa3"),
        "has no SM120 kernels (sgl-project/sglang#24633, sgl-project/sglang#17880)",
    ),
    "vllm": dict.fromkeys(
        ("CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"),
        "is for compute capability 9 or 10 (vllm-project/vllm vllm/v1/attention/backends/mla)",
    ),
}
"""Attention backends that cannot run on SM120, with why: a configuration that names one is refused."""


NO_LOADER = "neither grub nor systemd-boot was found: kernel arguments are not written by a deploy"


class TopologyError(Exception):
    """An invalid override key: says which, and which there are."""


@dataclass(frozen=True)
class Decision:
    """All settings of a host and one of its workloads, applied or only explained, and the cards they are for."""

    settings: tuple[Setting, ...]
    cards: tuple[Gpu, ...]
    left_out: tuple[Gpu, ...]
    """Cards that serve no configuration: of another kind than most, silent, or given to a guest."""
    workload: Workload = field(default_factory=Workload)

    @property
    def host(self) -> HostSettings:
        """The applied settings, as units and system take them over."""
        return host_settings(self.settings, tuple(card.index for card in self.cards))

    def find(self, key: str) -> Setting | None:
        """The setting of that name ("kernel_argument.iommu"), None when the policy says nothing of it."""
        return next((one for one in self.settings if one.key == key), None)


def decide(
    facts: HostFacts, overrides: Mapping[str, str | None] | None = None, workload: Workload | None = None
) -> Decision:
    """Settings for a host and one workload. overrides: "kind.name" -> value, or None to leave that setting alone.

    Raises TopologyError for an override of an unknown kind, and for a power limit that is no number.
    """
    wanted, work = dict(overrides or {}), workload or Workload()
    for key, value in wanted.items():
        _check_override(key, value)
    cards = usable_cards(facts)
    chosen = tuple(card for card in cards if work.gpus is None or card.index in work.gpus) or cards
    decided: dict[str, Setting] = {}
    host = Situation(facts, wanted, cards, len(cards), work.nccl, decided=decided)
    mine = Situation(facts, wanted, chosen, work.ranks or len(chosen), work.nccl, work.environment, decided)
    for stage in STAGES if cards else ():
        situation = host if stage in OF_THE_HOST else mine
        for rule in stage:
            if rule.holds(situation):
                setting = replace(_setting(rule, situation), needed=rule.needed(mine))
                decided[setting.key] = _possible(_overridden(setting, wanted), situation)
    for key in [one for one in wanted if one not in decided]:
        decided[key] = _possible(_own(key, wanted[key]), host)
    left_out = tuple(gpu for gpu in facts.gpus if gpu not in cards)
    return Decision(tuple(decided.values()), cards, left_out, work)


def usable_cards(facts: HostFacts) -> tuple[Gpu, ...]:
    """The equal cards with the most memory together that answer and are no guest's; of two such sets the larger one."""
    kinds: dict[str, list[Gpu]] = {}
    for gpu in facts.gpus:
        if gpu.answers is not False and not gpu.taken:
            kinds.setdefault(gpu.pci_id, []).append(gpu)
    most = max(kinds.values(), key=lambda kind: (sum(gpu.memory_mib or 0 for gpu in kind), len(kind)), default=[])
    return tuple(most)


def _setting(rule: Rule, situation: Situation) -> Setting:
    supports, against = reports(rule.name)
    kept = rule.kept(situation)
    outside = situation.container and rule.kind in OUTSIDE
    reason = rule.reason if isinstance(rule.reason, str) else rule.reason(situation)
    if kept is not None:
        reason += f"; {kept}"
    if outside:
        reason = f"for the host outside this container: {reason}"
    confidence = _confidence(supports)
    founded = confidence is not Confidence.SINGLE and (
        confidence is Confidence.DOCUMENTED or authors(supports) > authors(against)
    )
    return Setting(
        rule.kind,
        rule.setting,
        rule.value if isinstance(rule.value, str) or rule.value is None else rule.value(situation),
        reason,
        _sources(supports, against),
        confidence,
        applied=rule.applies and founded and kept is None and not outside,
        expected_gain=rule.gain,
        engines=rule.engines,
        supports=supports,
        against=against,
        kept=rule.live(situation),
        outside=outside,
    )


def _confidence(supports: tuple[Report, ...]) -> Confidence:
    if any(one.vendor for one in supports):
        return Confidence.DOCUMENTED
    if authors(supports) < 2:
        return Confidence.SINGLE
    return Confidence.MEASURED


def _sources(supports: Iterable[Report], against: Iterable[Report]) -> str:
    found = list(dict.fromkeys(one.source for one in supports))
    return "; ".join([*found, *(f"against: {one.source}" for one in against)]) or "no report"


def _overridden(setting: Setting, overrides: Mapping[str, str | None]) -> Setting:
    if setting.key not in overrides:
        return setting
    value = overrides[setting.key]
    policy = (setting.value or "unset") if setting.applied else "left alone"
    return replace(
        setting,
        value=setting.value if value is None else value,
        applied=value is not None,
        reason=f"{'left alone' if value is None else 'set'} by the operator; the policy: {setting.reason}",
        source="host data",
        confidence=Confidence.OPERATOR,
        replaces=policy,
        kept=False,
        outside=False,
    )


def _own(key: str, value: str | None) -> Setting:
    kind, _, name = key.partition(".")
    reason = "set by the operator; the policy says nothing of it on this host"
    return Setting(Kind(kind), name, value, reason, "host data", Confidence.OPERATOR, applied=value is not None)


def _possible(setting: Setting, situation: Situation) -> Setting:
    """Nothing is asked for that no reboot of this machine could bring."""
    if not (setting.applied and setting.needs_reboot):
        return setting
    if situation.container:
        reason = f"for the host outside this container, which no reboot of it sets: {setting.reason}"
        return replace(setting, applied=False, outside=True, reason=reason)
    unwritten = setting.kind is Kind.KERNEL_ARGUMENT and situation.facts.boot_loader is None
    if unwritten and standing(setting, situation.facts) in (Standing.PENDING, Standing.STAGED):
        return replace(setting, applied=False, blocked=True, reason=f"{NO_LOADER}; {setting.reason}")
    if setting.kind is Kind.MODULE_OPTION:
        module, _, option = setting.name.partition(".")
        files = situation.options(module, option)
        later = files[-1] if files else (MODPROBE, "")
        ours_is_last = later[0].rpartition("/")[2] < MODPROBE.rpartition("/")[2] or later[0] == MODPROBE
        if not (ours_is_last or same_value(later[1], setting.value)):
            reason = f"{later[0]} says {later[1]}, and wins over ours: set {setting.value} there; {setting.reason}"
            return replace(setting, applied=False, kept=False, blocked=True, reason=reason)
    return setting


def _check_override(key: str, value: str | None) -> None:
    """What no file of the host stage checks: values that go into units and command lines."""
    kind, _, name = key.partition(".")
    if kind not in Kind.__members__.values() or not name:
        raise TopologyError(
            f"host_overrides: {key!r} is no setting; a key is <kind>.<name>, kinds are {', '.join(Kind)}"
        )
    if value is None:
        return
    if kind == Kind.POWER_LIMIT and not re.fullmatch(r"[0-9]{1,5}", value):
        raise TopologyError(f"host_overrides: {key} is {value!r}; whole watts are needed")
    if kind == Kind.MEMORY_FRACTION and not re.fullmatch(r"0?\.\d*[1-9]\d*", value):
        raise TopologyError(f"host_overrides: {key} is {value!r}; a share between 0 and 1 is needed")
    if kind in (Kind.LIMIT, Kind.BOOT_UNIT) and not re.fullmatch(r"[\w.:@-]+", f"{key}{value}", re.ASCII):
        raise TopologyError(f"host_overrides: {key!r} is {value!r}; a unit takes letters, digits and .:@_- there")
