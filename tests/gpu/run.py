"""Both engines on real GPUs through the product's own parts, on a machine without network or systemd, thrown away.

python3 tests/gpu/run.py OUT [--steps NAME,...] [--tp N] [--again] [--standin]

Wheels of tests/gpu/wheels.py lie in /opt/carry; python3 holds the packages of requirements/control.txt. Engines start
in the directory of this tree: every user may read it. Each step writes what it found at once; one that is done is left
alone unless --again, so an interrupted run goes on where it was. The table comes last, OUT gets at most eight files.
--standin: a stand-in engine answers, for a rehearsal without GPUs.
Exit code 0: every step did as it should.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import termios
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files/hostkit")]

from rig.artifacts.units import unit_files
from rig.bench import ledger, report
from rig.bench.analysis import point
from rig.bench.collect import to_result
from rig.bench.sweeps import LoadAxis, find_sweep, generator_path, host_sweep
from rig.bench.variants import derive
from rig.catalog.entries import Configuration, Listen
from rig.cli.converge import pyinfra
from rig.operations.benchmark import generator_environment
from rig.plan.host_plan import HostPlan, plan_from_facts
from rigctl.contract import layout
from rigctl.contract.happened import Ended, Started
from rigctl.contract.limits import Limits
from rigctl.contract.sweep import CellResult, HostFacts
from rigctl.nvidia_smi import nvidia_smi
from rigctl.page_cache import evict
from rigctl.supervisor.activity import gpu_memory
from rigctl.supervisor.engine_client import Engine, Speculation
from rigctl.supervisor.specification import Specification, named
from rigctl.tiny_models.kimi import CHAT, CONTENT, KIMI
from rigctl.whole_files import read_object
from tests.gpu import standin_systemd as units
from tests.gpu.host_stage import inventory, read_facts, run
from tests.gpu.wheels import POINTER
from tests.support.tiny_models import predict_counters

WORK = Path("/var/lib/kimi-rig-gpu")
CARRY = Path("/opt/carry")
SHARED_CACHE = "/var/cache/kimi-rig-gpu"
GENERATOR_LOCK = f"{layout.LOCKS}/aiperf.txt"
STAGES = ("base", "hostkit", "engines", "checkpoints", "units")
# Catalogue entry -> what its drafter does (rigctl tiny-model), which is its short name too.
DRAFTS: dict[str, Any] = {
    f"{engine}-{entry}": drafter
    for engine in ("vllm", "sglang")
    for entry, drafter in {
        "base": None,
        "eagle3-aq-medai": "never",
        "eagle3-custom": "always",
        "eagle3-custom-current": "half",
    }.items()
}
RELEASES = {"vllm": "vllm-0.26.0", "sglang": "sglang-0.5.16"}
# Attention backends that live beside each other; None: the engine's own choice.
ATTENTION: dict[str, tuple[str | None, ...]] = {"vllm": (None, "TRITON_MLA"), "sglang": ("triton", None)}
SUPERVISION = Limits(sample_seconds=2, drain_seconds=10, stop_seconds=30, restart_delay_seconds=2, gpu_wait_seconds=90)
# The flag that names the largest CUDA graph of a decode step.
GRAPHS = {"vllm": "max-cudagraph-capture-size", "sglang": "cuda-graph-max-bs-decode"}
LARGE = ROOT / "inventory/overlays/gpu-large.yaml"
LARGE_CHECKPOINT = Path("/data/large")
ENGINES = re.compile(r"sglang[.:]|vllm[.:]|VLLM::|standin\.py")
HOLD_MIB = 8192
CLIENTS = 32
"""That ask at once, in the steps of overhead."""
PIPE_BYTES = 1 << 20
HOLD = """
import sys, torch
memory = torch.ones(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda:0")
print("holds", flush=True)
sys.stdin.read()
"""


class Wrong(Exception):
    """Something is not as it should be; the text goes into the table."""


@dataclass(frozen=True)
class Variant:
    """One configuration of the run: a catalogue entry on certain cards."""

    entry: str
    gpus: tuple[int, ...]
    attention: str | None
    """None: the engine's own choice."""
    unlimited: bool = False
    """Leaves the number of running requests to the engine."""
    streams: int | None = None
    """Requests that run at once, and the largest CUDA graph; None: what the overlay says."""

    @property
    def engine(self) -> str:
        return self.entry.partition("-")[0]

    @property
    def name(self) -> str:
        cards = "".join(map(str, self.gpus))
        short = f"{self.engine}-{self.drafter or 'base'}"
        return f"{short}-{self.attention or 'default'}-tp{len(self.gpus)}-g{cards}"

    @property
    def drafter(self) -> Any:
        return DRAFTS[self.entry]


def configuration(plan: HostPlan, variant: Variant) -> Configuration:
    """The catalogue entry, reduced to the cards of this run."""
    entry = plan.serving[variant.entry]
    flags = {key: value for key, value in entry.flags.items() if key != "attention-backend"}
    if variant.attention:
        flags["attention-backend"] = variant.attention
    if variant.streams:
        flags[GRAPHS[variant.engine]] = variant.streams
    caches = {
        "VLLM_CACHE_ROOT": f"{SHARED_CACHE}/vllm",
        "TVM_FFI_CACHE_DIR": f"{SHARED_CACHE}/tvm-ffi",
        "TRITON_CACHE_DIR": f"{SHARED_CACHE}/triton",
        "FLASHINFER_WORKSPACE_BASE": SHARED_CACHE,
    }
    return entry.model_copy(
        update={
            "gpus": list(variant.gpus),
            "tensor_parallel": len(variant.gpus),
            "listen": Listen(port=18400 + variant.gpus[0]),
            "flags": flags,
            "environment": {**entry.environment, **caches},
            "max_running_requests": None if variant.unlimited else variant.streams or 32,
        }
    )


def write_units(variants: Iterable[Variant], *, standin: bool) -> HostPlan:
    """Unit files and run specifications of the variants, as a deploy would write them."""
    plan = plan_of(variants, standin=standin)
    write_files(plan)
    Path(SHARED_CACHE).mkdir(exist_ok=True)
    shutil.chown(SHARED_CACHE, plan.data.service_user)
    return plan


def write_files(plan: HostPlan) -> None:
    for path, text in unit_files(plan).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def plan_of(variants: Iterable[Variant], *, standin: bool) -> HostPlan:
    """The plan of this machine with the variants as its configurations."""
    plan = plan_from_facts({**group_data(), **host_data()}, read_facts())
    serving = {variant.name: configuration(plan, variant) for variant in variants}
    environments = dict(plan.environments)
    if standin:
        for name, env in environments.items():
            release = env.release.model_copy(update={"launch": [str(ROOT / "tests/standin.py")]})
            environments[name] = replace(env, release=release)
    supervision = SUPERVISION.model_copy(update={"shared_memory": "50%"})
    supervised = plan.data.model_copy(update={"supervision": supervision})
    # The host stage does not run here: nothing of it is looked for before a start.
    bare: dict[str, Any] = {
        "kernel_arguments": (),
        "module_options": {},
        "sysctls": {},
        "governor": None,
        "disk_scheduler": {},
    }
    settings = replace(plan.settings, **bare, power_limit_w=None)
    return replace(plan, serving=serving, environments=environments, data=supervised, settings=settings)


def host_data() -> dict[str, Any]:
    """What this machine's inventory says: the engines whose locks have come so far."""
    there = [engine for engine, release in RELEASES.items() if (CARRY / f"{release}.txt").exists()]
    large = LARGE.exists()
    return {
        "catalogue_overlay": LARGE.name if large else "gpu-proof.yaml",
        # The drafters have the tiny target's sizes and are refused beside the large one.
        "configurations": [
            entry for entry, drafter in DRAFTS.items() if entry.partition("-")[0] in there and not (large and drafter)
        ],
        "base_packages": [],
        "wheels": str(CARRY),
    }


def group_data() -> dict[str, Any]:
    found = runpy.run_path(str(ROOT / "inventory/group_data/all.py"))
    return {key: value for key, value in found.items() if not key.startswith("_")}


# What is on the cards, and who


def used_mib(gpus: Iterable[int]) -> list[int]:
    """MiB in use on each of the cards."""
    memory = gpu_memory(list(gpus))
    return [memory.get(gpu, -1) for gpu in gpus]


def processes() -> list[str]:
    """Command lines of engines that run, anywhere on the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (
                re.search(r"sglang[.:]|vllm[.:]|VLLM::|standin\.py", line)
                and "rigctl" not in line
                and "standin_systemd" not in line
            ):
                found.append(f"{path.parent.name} {line[:120]}")
    return found


def shared_memory() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir())


def wait_free(gpus: Iterable[int], seconds: float = 30) -> tuple[float, list[int]]:
    """Seconds until the cards hold less than 1 GiB each, and what they hold then."""
    begin = time.monotonic()
    while max(used := used_mib(gpus), default=0) >= 1024 and time.monotonic() - begin < seconds:
        time.sleep(0.1)
    return round(time.monotonic() - begin, 2), used


# Starting, asking, stopping


def started(name: str) -> dict[str, Any]:
    found = Started.known(named(name).runtime)
    return found.model_dump(exclude_unset=True) if found else {}


def last_words(name: str) -> str:
    log = units.STATE / f"kimi-{name}.service.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line for line in lines if re.search(r"Error|error:|pre-check|not accepted|ended by itself", line)]
    return " | ".join((told or lines)[-4:])[-1500:]


def start(variant: Variant) -> dict[str, Any]:
    """Start one; what the supervisor wrote down. Raises Wrong with the engine's last words.

    cold: nothing like it was accepted on this machine before, so that its kernels and graphs may be compiled now.
    """
    specification, begin = named(variant.name), time.monotonic()
    earlier = WORK / "accepted" / variant.name
    found: dict[str, Any] = {"cold": not earlier.exists()}
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(units.start, specification.unit)
        found["answers_after"] = first_answer(specification.base_url, starting, begin)
        code = starting.result()
    found["seconds"] = round(time.monotonic() - begin, 1)
    if code != 0:
        cause = (Ended.known(specification.state) or Ended()).cause
        raise Wrong(f"not accepted after {found['seconds']} s: {cause}: {last_words(variant.name)}")
    earlier.parent.mkdir(exist_ok=True)
    earlier.touch()
    facts = started(variant.name)
    kept = {"load_seconds": "load", "probe_seconds": "probes", "proved": "proved", "prechecks": "checks"}
    return found | {ours: facts.get(theirs) for theirs, ours in kept.items()}


def first_answer(url: str, starting: Future[int], begin: float) -> float | None:
    """Seconds until the engine, asked independently of the supervisor, has a model list; None when it never had."""
    seen_closed = False
    while not starting.done():
        try:
            if requests.get(f"{url}/v1/models", timeout=2).ok and seen_closed:
                return round(time.monotonic() - begin, 2)
        except requests.RequestException:
            seen_closed = True  # until then another configuration may answer there
        time.sleep(0.02)
    return None


def counters(variant: Variant) -> list[int]:
    """Drafts, drafted and accepted tokens of the chat as rigctl derives them from the engine's counters.

    SGLang's know the tokens that came out: what is accepted beyond the end of the turn is in vLLM's counters only.
    """
    expected = predict_counters(KIMI, CHAT, variant.drafter, 3)
    out = expected.output_tokens - 1 - expected.drafts
    return [expected.drafts, expected.draft_tokens, expected.accepted if variant.engine == "vllm" else out]


def ask(variant: Variant) -> dict[str, Any]:
    """One chat; text, counters against the prediction, the engine's own rate and settings."""
    specification = named(variant.name)
    engine = Engine(specification)
    before = engine.metrics().speculation or Speculation(0, 0, 0)
    message = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=512)["message"]
    found: dict[str, Any] = {"text": message.get("content") == CONTENT}
    expected = counters(variant) if variant.drafter else None
    end = time.monotonic() + 10
    while expected and time.monotonic() < end:
        now = engine.metrics()
        moved = (now.speculation or Speculation(0, 0, 0)).since(before)
        found["counted"] = [moved.drafts, moved.drafted, moved.accepted]
        found["length"] = moved.acceptance_length and round(moved.acceptance_length, 3)
        found["own_rate"], found["own_length"] = now.own_rate, now.own_length
        if moved.drafts >= expected[0]:
            break
        time.sleep(0.5)
    if expected:
        found["predicted"] = expected
    (WORK / "metrics").mkdir(exist_ok=True)
    (WORK / "metrics" / f"{variant.name}.txt").write_text(engine.metrics_text())
    with contextlib.suppress(requests.RequestException, ValueError):
        info = requests.get(f"{specification.base_url}/server_info", timeout=10).json()
        (WORK / "metrics" / f"{variant.name}-info.json").write_text(json.dumps(info, indent=1, default=str))
        states = info.get("internal_states") or [{}]
        found["running_limit"] = states[0].get("effective_max_running_requests_per_dp") or info.get(
            "max_running_requests"
        )
        found["max_running_requests"] = info.get("max_running_requests")
        found["attention"] = [info.get("attention_backend"), info.get("prefill_attention_backend")]
    if variant.engine == "vllm":
        found["max_running_requests"] = None if variant.unlimited else variant.streams or 32
        found["attention"] = chosen_attention(variant.name)
    return found


def chosen_attention(name: str) -> list[str]:
    """The backends that vLLM names in its log, the target's first."""
    log = units.STATE / f"kimi-{name}.service.log"
    return [
        *dict.fromkeys(
            re.findall(
                r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention |MLA prefill )?backend",
                log.read_text(errors="replace"),
            )
        )
    ]


def stop(variant: Variant) -> dict[str, Any]:
    """Stop one; what is left."""
    begin = time.monotonic()
    units.stop(f"kimi-{variant.name}.service")
    seconds = round(time.monotonic() - begin, 2)
    free, used = wait_free(variant.gpus)
    result = units.read(f"kimi-{variant.name}.service")["Result"]
    return {"seconds": seconds, "result": result, "until_free": free, "mib": used}


def served(variant: Variant) -> dict[str, Any]:
    """The whole life of one configuration."""
    found: dict[str, Any] = {"before_mib": used_mib(variant.gpus)}
    try:
        found["start"] = start(variant)
        found["serving_mib"] = used_mib(variant.gpus)
        found["ask"] = ask(variant)
    except (Wrong, requests.RequestException) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["stop"] = stop(variant)
    keep_log(variant.name)
    return found


def keep_log(name: str) -> None:
    (WORK / "logs").mkdir(exist_ok=True)
    log = units.STATE / f"kimi-{name}.service.log"
    if log.exists():
        shutil.copy(log, WORK / "logs" / f"{name}.log")


def validate(found: dict[str, Any], *, standin: bool = False) -> None:
    """Raise Wrong for what a life must not have."""
    if "error" in found:
        raise Wrong(found["error"])
    validate_answer(found["ask"], standin=standin)
    if max(found["stop"]["mib"]) >= 1024:
        raise Wrong(f"still on the cards: {found['stop']['mib']} MiB")


def validate_answer(asked: dict[str, Any], *, standin: bool = False) -> None:
    """Raise Wrong for another text or other counters. A stand-in says something else, and counts otherwise."""
    if standin:
        return
    if not asked["text"]:
        raise Wrong("the text is not the model's")
    if asked.get("predicted") and asked["counted"] != asked["predicted"]:
        raise Wrong(f"counted {asked['counted']}, predicted {asked['predicted']}")


# Steps: each fills `found` as it goes, so that a failure leaves what was found before it

Step = Callable[[argparse.Namespace, dict[str, Any]], None]


def deploy(_: argparse.Namespace, found: dict[str, Any]) -> None:
    """Environment, checkpoints and units by the product's own operations; a second look finds nothing to do."""
    location = run("python3", "-c", "import torch; print(torch.__file__)").strip()
    Path(POINTER).write_text(f"{Path(location).parents[1]}\n")
    for release in RELEASES.values():
        if (CARRY / f"{release}.txt").exists():
            shutil.copy(CARRY / f"{release}.txt", ROOT / f"files/locks/gpu-proof-{release}-cp312.txt")
    folder = WORK / "inventory"
    shutil.rmtree(folder, ignore_errors=True)
    hosts = inventory(folder, **host_data())
    stages = [f"tasks/{stage}.py" for stage in STAGES]
    found["seconds"] = {}
    for stage in stages:
        begin = time.monotonic()
        done = subprocess.run(pyinfra(hosts, stage, "-y"), capture_output=True, text=True, check=False, cwd=ROOT)
        (WORK / "logs").mkdir(exist_ok=True)
        (WORK / "logs" / f"deploy-{Path(stage).stem}.log").write_text(done.stdout + done.stderr)
        found["seconds"][stage] = round(time.monotonic() - begin, 1)
        if done.returncode != 0:
            raise Wrong(f"{stage}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
    left = []
    for stage in stages:
        plan = json.loads(run(*pyinfra(hosts, stage, "--dry", "--json")))["plan"]
        left += [one["name"] for one in plan if one["hosts_with_change"] or one["hosts_with_conditional_change"]]
    if left:
        raise Wrong(f"a second deploy would change: {left}")
    environments = plan_from_facts({**group_data(), **host_data()}, read_facts()).environments.values()
    proofs = [json.loads(path.read_text()) for path in sorted(Path(layout.PROOFS).iterdir())]
    found |= {
        "environments": [environment.path for environment in environments],
        "versions": {proof.get("version"): proof.get("features") for proof in proofs},
    }


def groups(entries: Iterable[str], cards: int, tp: int) -> list[list[Variant]]:
    """Lives of these catalogue entries, each on `tp` cards; those of a group go on at once, on cards of their own."""
    wanted = [(entry, attention) for entry in entries for attention in ATTENTION[entry.partition("-")[0]]]
    at_once = max(1, cards // tp)
    return [
        [
            Variant(entry, tuple(range(place * tp, (place + 1) * tp)), attention, DRAFTS[entry] == "half")
            for place, (entry, attention) in enumerate(wanted[first : first + at_once])
        ]
        for first in range(0, len(wanted), at_once)
    ]


def lives(names: Sequence[str]) -> Step:
    """The step that lets these catalogue entries live, each on as many cards as tensor parallelism has."""

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        rounds = groups(names, arguments.cards, arguments.tp)
        write_units([variant for group in rounds for variant in group], standin=arguments.standin)
        shm = shared_memory()
        for group in rounds:
            with ThreadPoolExecutor() as pool:
                found |= dict(zip([v.name for v in group], pool.map(served, group), strict=True))
        found["processes"], found["shared_memory"] = processes(), [n for n in shared_memory() if n not in shm]
        problems = []
        for name, life in found.items():
            if isinstance(life, dict):
                try:
                    validate(life, standin=arguments.standin)
                except Wrong as error:
                    problems.append(f"{name}: {error}")
        if found["processes"]:
            problems.append(f"orphans: {found['processes']}")
        if problems:
            raise Wrong("; ".join(problems))

    return step


def gate(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """A start waits while another process holds memory, and goes on when it is gone; then the supervisor is killed."""
    variant = Variant("sglang-eagle3-custom", (0,), "triton")
    write_units([variant], standin=arguments.standin)
    unit = f"kimi-{variant.name}.service"
    if arguments.standin:
        holder = subprocess.Popen(["sleep", "600"])
    else:
        holder = subprocess.Popen(["python3", "-c", HOLD, str(HOLD_MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not holder.stdout or holder.stdout.readline().strip() != b"holds":
            raise Wrong("the holder could not take memory")
    found["held_mib"] = used_mib((0,))
    with ThreadPoolExecutor() as pool:
        begin = time.monotonic()
        starting = pool.submit(start, variant)
        time.sleep(8)
        found["while_held"] = {key: units.read(unit)[key] for key in ("ActiveState", "StatusText")}
        found["processes_while_held"] = len(units.Service(unit).members())
        holder.kill()
        holder.wait()
        killed = time.monotonic()
        found["start"] = starting.result()
        found["held_seconds"] = round(killed - begin, 1)
        found["accepted_after_release"] = round(time.monotonic() - killed, 1)
    found["serving_mib"] = used_mib(variant.gpus)
    if found["processes_while_held"] != 1:
        raise Wrong(
            f"{found['processes_while_held']} processes although the card was in use: the supervisor alone waits"
        )
    # Killed: what ends by itself, and what is left for the control group.
    units.LINGER.write_text("3")
    pid = int(units.read(unit)["MainPID"])
    begin = time.monotonic()
    os.kill(pid, 9)
    time.sleep(2.5)
    found["after_2.5_s"] = {"processes": processes(), "mib": used_mib(variant.gpus)}
    while units.read(unit)["MainPID"] == str(pid) and time.monotonic() - begin < 60:
        time.sleep(0.1)
    found["lingering"] = units.read(unit).get("Lingering", "")
    found["group_gone_after"] = round(time.monotonic() - begin, 1)
    units.LINGER.unlink()
    while units.read(unit)["ActiveState"] == "activating" and time.monotonic() - begin < 300:
        time.sleep(0.5)
    found["restarted"] = units.read(unit)["ActiveState"]
    found["restart_checks"] = started(variant.name).get("prechecks", {}).get("GPUs")
    found["restart_seconds"] = round(time.monotonic() - begin, 1)
    found["stop"] = stop(variant)
    keep_log(variant.name)
    if found["restarted"] != "active":
        raise Wrong(f"not active again: {last_words(variant.name)}")


def killed_and_back(variant: Variant, pid: int, line: str, *, standin: bool) -> dict[str, Any]:
    """Kill a process of a serving unit: what the unit says of it, when it is active again, and what it answers then."""
    unit = f"kimi-{variant.name}.service"
    main, begin = units.read(unit)["MainPID"], time.monotonic()
    found: dict[str, Any] = {"killed": line}
    os.kill(pid, 9)
    while units.read(unit)["MainPID"] == main and time.monotonic() - begin < 120:
        time.sleep(0.05)
    found["ended_after"] = round(time.monotonic() - begin, 2)
    ended = Ended.known(named(variant.name).state) or Ended()
    found |= {"cause": ended.cause, "left": ended.left, "ended_by_hand": ended.killed}
    while units.read(unit)["ActiveState"] == "activating" and time.monotonic() - begin < 300:
        time.sleep(0.2)
    found["restart_seconds"] = round(time.monotonic() - begin, 1)
    if units.read(unit)["ActiveState"] != "active":
        raise Wrong(f"not active again after {line} was killed: {last_words(variant.name)}")
    found["restart_proved"] = started(variant.name).get("proved", {}).get("speculation")
    found["restart_checks"] = started(variant.name).get("prechecks", {}).get("GPUs")
    found["again"] = ask(variant)
    validate_answer(found["again"], standin=standin)
    return found


def worker(variant: Variant) -> tuple[int, str]:
    """Pid and command line of the process that computes on the last card. Raises Wrong when there is none."""
    found = [line for kind in ("scheduler|Worker", "EngineCore") for line in processes() if re.search(kind, line)]
    if not found:
        raise Wrong(f"{variant.name}: no worker among {processes()}")
    last = next((line for line in found if re.search(rf"TP{len(variant.gpus) - 1}\b", line)), found[0])
    return int(last.split()[0]), last


def server(variant: Variant) -> tuple[int, str]:
    """Pid and command line of the engine's own main process, the supervisor's child."""
    main = units.read(f"kimi-{variant.name}.service")["MainPID"]
    pid = int(Path(f"/proc/{main}/task/{main}/children").read_text().split()[0])
    return pid, next((line for line in processes() if int(line.split()[0]) == pid), str(pid))


def faults(entry: str, other: str) -> Step:
    """The step that kills a worker and the server of one configuration, and switches to another and back."""

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        cards = tuple(range(arguments.tp))
        first, second = (Variant(name, cards, ATTENTION[name.partition("-")[0]][0]) for name in (entry, other))
        write_units([first, second], standin=arguments.standin)
        found["before_mib"] = used_mib(cards)
        found["start"] = start(first)
        found["serving_mib"] = used_mib(cards)
        found["ask"] = ask(first)
        validate_answer(found["ask"], standin=arguments.standin)
        if not arguments.standin:  # it is one process
            found["worker"] = killed_and_back(first, *worker(first), standin=arguments.standin)
        found["server"] = killed_and_back(first, *server(first), standin=arguments.standin)
        for one, before in ((second, first), (first, second)):
            begin = time.monotonic()
            switch: dict[str, Any] = {"start": start(one), "seconds": round(time.monotonic() - begin, 1)}
            unit = f"kimi-{before.name}.service"
            switch["displaced"] = {key: units.read(unit)[key] for key in ("ActiveState", "Result")}
            switch |= {"mib": used_mib(cards), "ask": ask(one)}
            found[f"switch to {one.name}"] = switch
            validate_answer(switch["ask"], standin=arguments.standin)
        found["stop"] = stop(first)
        keep_log(first.name)
        keep_log(second.name)
        found["processes"], found["shared_memory"] = processes(), shared_memory()
        validate(found, standin=arguments.standin)
        if found["processes"]:
            raise Wrong(f"left {found['processes']}")

    return step


def answers_a_second(specification: Specification, failures: list[str]) -> float:
    """Whole answers a second to 512 questions from 32 clients; what the others got instead is added to `failures`."""

    def asked(question: str) -> bool:
        try:
            Engine(specification).completion(question, max_tokens=128)
        except requests.HTTPError as error:
            failures.append(f"{error.response.status_code} {error.response.text[:500]}")
            return False
        except requests.RequestException as error:
            failures.append(f"{type(error).__name__}: {error}"[:500])
            return False
        return True

    begin = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answered = sum(pool.map(asked, [f"{begin} {number}" for number in range(CLIENTS * 16)]))
    return round(answered / (time.monotonic() - begin), 2)


def overhead(entry: str) -> Step:
    """The step that compares answers a second with the supervisor watching and with the supervisor stopped.

    An answer that fails ends no round, but the step is not right then: the figures stand beside what came instead.
    """

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        attention = ATTENTION[entry.partition("-")[0]][0]
        variant = Variant(entry, tuple(range(arguments.tp)), attention, streams=CLIENTS)
        write_units([variant], standin=arguments.standin)
        failures: list[str] = []
        try:
            found["start"] = start(variant)
            specification = named(variant.name)
            main = int(units.read(f"kimi-{variant.name}.service")["MainPID"])
            found |= {"watch_seconds": specification.limits.watch_seconds, "watching": [], "stopped": []}
            found["warm"] = answers_a_second(specification, failures)
            with wide_pipes(main) as unread:
                for _ in range(5):
                    found["watching"].append(answers_a_second(specification, failures))
                    os.kill(main, signal.SIGSTOP)
                    try:
                        found["stopped"].append(answers_a_second(specification, failures))
                        found["unread_bytes"] = max(found.get("unread_bytes", 0), unread())
                    finally:
                        os.kill(main, signal.SIGCONT)
        finally:
            found["stop"] = stop(variant)
            keep_log(variant.name)
            if failures:
                found["failures"] = {text: failures.count(text) for text in failures}
                found["log"] = told_errors(variant.name)
        if failures:
            raise Wrong(f"{len(failures)} of {11 * CLIENTS * 16} answers failed: {failures[0]}")

    return step


@contextlib.contextmanager
def wide_pipes(pid: int) -> Iterator[Callable[[], int]]:
    """Make room in the pipes that a process reads, or an engine's log fills them while it is stopped.

    Yields a function that counts the bytes that wait in them.
    """
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if str(link.readlink()).startswith("pipe:")]
    with contextlib.ExitStack() as stack:
        pipes = []
        for link in links:
            with contextlib.suppress(OSError):  # the writing end of one that nobody reads
                pipes.append(os.open(link, os.O_RDONLY | os.O_NONBLOCK))
                stack.callback(os.close, pipes[-1])
                fcntl.fcntl(pipes[-1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        yield lambda: max((_waiting(pipe) for pipe in pipes), default=0)


def _waiting(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def told_errors(name: str) -> list[str]:
    """The engine's log around what it calls an error: at most 200 lines, and its last 20."""
    log = units.STATE / f"kimi-{name}.service.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [number for number, line in enumerate(lines) if re.search(r"Traceback|Error\b|ERROR", line)]
    near = sorted({at for number in told for at in range(max(0, number - 3), min(len(lines), number + 30))})
    return [lines[at][:300] for at in near[:200]] + ["...", *(line[:300] for line in lines[-20:])]


def large(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """A large checkpoint in the tiny target's place, for the steps after this one.

    The sweeps `load-vllm` and `load-sglang` measure how long it takes to load.
    """
    path = LARGE_CHECKPOINT
    if not (path / "model.safetensors.index.json").exists():  # written last
        found["made"] = run("python3", str(ROOT / "tests/gpu/large.py"), str(path), str(arguments.gigabytes)).strip()
    overlay = yaml.safe_load((ROOT / "inventory/overlays/gpu-proof.yaml").read_text())
    unlike = dict.fromkeys(("digests", "bytes", "shape"))
    overlay["checkpoints"]["kimi-k2.5-int4"] = {"path": str(path), "source": {"kind": "directory"}, **unlike}
    LARGE.write_text(yaml.safe_dump(overlay))
    shutil.rmtree(WORK / "inventory-large", ignore_errors=True)
    hosts = inventory(WORK / "inventory-large", **host_data())
    for stage in ("checkpoints", "units"):
        run(*pyinfra(hosts, f"tasks/{stage}.py", "-y"))


def switches(*ways: tuple[str, bool]) -> Step:
    """The step that goes from one engine to the other and back on the large checkpoint, each time with a cold cache.

    ways: the engine that serves then, and whether its files are read beforehand (`rigctl switch --warm`).
    """

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        if not LARGE.exists():
            raise Wrong("the step large comes first")
        both = {engine: Variant(f"{engine}-base", (0,), ATTENTION[engine][0], streams=16) for engine in RELEASES}
        write_units(both.values(), standin=arguments.standin)
        before = next(one for engine, one in both.items() if engine != ways[0][0])
        found["first"] = start(before)
        for engine, warm in ways:
            for file in LARGE_CHECKPOINT.iterdir():
                evict(file)
            found[f"switch{' --warm' * warm} to {both[engine].name}"] = switched(both[engine], ["--warm"] * warm)
        for one in both.values():
            stop(one)
            keep_log(one.name)

    return step


def switched(after: Variant, options: Sequence[str]) -> dict[str, Any]:
    """`rigctl switch` to it: its lines with the seconds when they came, and how long nobody answered on the port.

    Raises Wrong when it is not accepted.
    """
    url, begin = named(after.name).base_url, time.monotonic()
    command = [layout.RIGCTL, "switch", *options, after.name]
    answered: list[float] = [begin]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        ThreadPoolExecutor() as pool,
    ):
        asking = pool.submit(_answers_until, lambda: process.poll() is not None, url, answered)
        said = [(round(time.monotonic() - begin, 1), line.rstrip()) for line in process.stdout or ()]
        code = process.wait()
        asking.result()
    gaps = [later - earlier for earlier, later in itertools.pairwise(answered)]
    if code:
        raise Wrong(f"{' '.join(command)}: exit code {code}: {said[-5:]}")
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "nobody_answered_seconds": round(max(gaps, default=0), 1),
        "said": said[-60:],
    }


def _answers_until(over: Callable[[], bool], url: str, answered: list[float]) -> None:
    """Ask for the model list until it is over, and once more; the moments when it came."""
    last = False
    while not last:
        last = over()
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/v1/models", timeout=2).ok:
                answered.append(time.monotonic())
        time.sleep(0.1)


def program(name: str) -> Step:
    """The step that a program of this folder is: `NAME.py OUT [--cpu]` leaves what it found in OUT/NAME.json."""

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        path, out, log = ROOT / f"tests/gpu/{name}.py", WORK / name, WORK / "logs" / f"{name}.log"
        if not path.exists():
            raise Wrong(f"{path} is not there")
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as file:
            command = [sys.executable, str(path), str(out), *(["--cpu"] if arguments.standin else [])]
            code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
        found |= read_object(out / f"{name}.json") or {}
        if code:
            raise Wrong(f"exit code {code}: {log.read_text(errors='replace')[-1500:]}")

    return step


def generator(_: argparse.Namespace, found: dict[str, Any]) -> None:
    """The load generator's environment, by the product's own program from the wheels that are here."""
    plan = plan_from_facts({**group_data(), **host_data()}, read_facts())
    shutil.copy(CARRY / "aiperf.txt", GENERATOR_LOCK)
    path, cache = generator_path(plan.data.ml_env), f"{plan.data.ml_env}/.cache"
    python = next(iter(plan.environments.values())).python
    described = generator_environment(path, python, GENERATOR_LOCK, cache, plan.data.wheels)
    begin = time.monotonic()
    run(layout.RIGCTL, "environment", "build", json.dumps(described.document()))
    found |= {"path": path, "seconds": round(time.monotonic() - begin, 1)}


def sweep(name: str, entries: Sequence[str], streams: int | None = None, **changes: Any) -> Step:
    """The step that measures these catalogue entries on as many cards as tensor parallelism has, for the ledger.

    changes: what differs from the sweep of inventory/benchmark.yaml.
    """

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        cards = tuple(range(arguments.tp))
        variants = [Variant(one, cards, ATTENTION[one.partition("-")[0]][0], streams=streams) for one in entries]
        chosen = find_sweep(name).model_copy(update=changes)
        derived = derive(write_units(variants, standin=arguments.standin), chosen, [one.name for one in variants])
        write_files(derived.plan)
        asked = host_sweep(derived.plan, name, chosen, derived.names)
        path = Path(asked.directory, "sweep.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(asked.order.text())
        # Our own packages must not reach the load generator.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [layout.RIGCTL, "bench", "run", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        (WORK / "logs").mkdir(exist_ok=True)
        (WORK / "logs" / f"bench-{name}.log").write_text(done.stdout + done.stderr)
        for one in derived.names:
            keep_log(one)
        models = sorted(set(derived.plan.checkpoint_paths.values()))
        facts = HostFacts.parse(json.loads(run(layout.RIGCTL, "bench", "host", *models)), "rigctl bench host")
        found |= {"exit": done.returncode, "skipped": list(asked.skipped), "cells": {}}
        for line in run(layout.RIGCTL, "bench", "results", str(path)).splitlines():
            measured = CellResult.parse(json.loads(line), "rigctl bench results")
            result = to_result(measured, asked, derived, "gpu-proof", facts)
            ledger.append(result, WORK / "ledger")
            found["cells"][f"{result.configuration.name}, {result.workload.concurrency}"] = cell(result)
        left = [one for one in derived.names if units.is_active(f"kimi-{one}.service")]
        failed = {key: one["cause"] for key, one in found["cells"].items() if one["cause"]}
        if done.returncode or failed or left or len(found["cells"]) != len(asked.order.pairs):
            said = (done.stdout + done.stderr)[-1500:]
            raise Wrong(f"exit code {done.returncode}, failed {failed}, still active {left}: {said}")
        tokens = chosen.output_tokens if chosen.ignore_eos else predict_counters(KIMI, CHAT, None, 0).output_tokens
        for key, one in found["cells"].items():
            expected = acceptance_length(key, tokens)
            if expected and not arguments.standin and abs(one["length"] - expected) > 0.001:
                raise Wrong(f"{key}: acceptance length {one['length']}, expected {expected}")
            if chosen.profile and not one["profile"]:
                raise Wrong(f"{key}: not profiled: {done.stdout[-1500:]}")

    return step


def acceptance_length(name: str, tokens: int) -> float | None:
    """What answers of this length come to; None where it depends on the text.

    The last draft of an answer passes its end: vLLM counts it whole, SGLang as far as it came out.
    """
    engine, drafter, *_ = name.split("-")
    whole = {"always": 4.0, "never": 1.0}.get(drafter)
    return whole if whole != 4.0 or engine == "vllm" else (tokens - 1) / -(-(tokens - 1) // 4)


def cell(result: ledger.Result) -> dict[str, Any]:
    """What a cell came to, for the table of this run."""
    measured = point(result)
    return {
        "tok_s": [round(one.output_tok_s, 1) for one in result.rounds],
        "stream_tok_s": [round(one.stream_tok_s, 1) for one in result.rounds],
        "length": measured.length if measured else None,
        "profile": result.profile,
        "cause": result.cause,
    }


STEPS: dict[str, Step] = {
    "deploy": deploy,
    **{f"{entry.partition('-')[0]}-{DRAFTS[entry] or 'base'}": lives([entry]) for entry in DRAFTS},
    "gate": gate,
    "vllm-faults": faults("vllm-eagle3-custom", "sglang-base"),
    "sglang-faults": faults("sglang-eagle3-custom", "sglang-base"),
    "vllm-overhead": overhead("vllm-base"),
    "sglang-overhead": overhead("sglang-base"),
    "train": program("train"),
    "generator": generator,
    "large": large,
    "load-vllm": sweep("load-vllm", ["vllm-base"], streams=16),
    "load-sglang": sweep("load-sglang", ["sglang-base"], streams=16),
    "switch-warm": switches(("sglang", True)),
    "switch-both": switches(("sglang", True), ("vllm", True), ("sglang", False), ("vllm", False)),
    # Both engines side by side. Answers of one length, whatever the text.
    "engines": sweep(
        "quick",
        ["vllm-base", "vllm-eagle3-custom", "sglang-base", "sglang-eagle3-custom"],
        streams=128,
        rounds=3,
        requests_per_stream=2,
        output_tokens=256,
        ignore_eos=True,
    ),
    # The cell of it that the first run's time did not reach.
    "sglang-128": sweep(
        "quick",
        ["sglang-eagle3-custom"],
        streams=128,
        rounds=3,
        requests_per_stream=2,
        output_tokens=256,
        ignore_eos=True,
        loads=[LoadAxis(context=0, concurrency=[128])],
    ),
    "profile": sweep("profile", ["sglang-base", "sglang-eagle3-custom"]),
    "quick": sweep("quick", ["sglang-base", "sglang-eagle3-custom", "sglang-eagle3-aq-medai"]),
    "attention": sweep("attention-sglang", ["sglang-base"]),
    "nccl": sweep("nccl", ["sglang-base"]),
}


HEAD = (
    "| configuration | first answer / accepted after, s | start | MiB before / serving / after | stopped in, s |"
    " drafts / drafted / accepted | length | engine's rate | request limit | attention |"
)


def rows(results: dict[str, Any]) -> list[str]:
    """A table of lives, a line each, then a line for each step that failed."""
    lives: dict[str, dict[str, Any]] = {}
    for step, result in results.items():
        found = result.get("found", {}) if step != "machine" else {}
        lives |= {name: life for name, life in found.items() if isinstance(life, dict) and _lived(life)}
        if _lived(found):
            lives[f"{step}, first"] = found
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    lines += [f"| {name} | {_summary(life)} |" for name, life in lives.items()]
    failed = [(name, one) for name, one in results.items() if name != "machine" and one["outcome"] != "ok"]
    return lines + [f"{name} failed: {one['why'][:300]}" for name, one in failed]


def _lived(found: dict[str, Any]) -> bool:
    return {"start", "ask"} <= found.keys()


def _summary(life: dict[str, Any]) -> str:
    asked, begun, ended = life["ask"], life["start"], life.get("stop", {})
    mib = [life.get("before_mib"), life.get("serving_mib") or life.get("mib"), ended.get("mib")]
    counted = " / ".join(map(str, asked["counted"])) if "counted" in asked else "no drafter"
    return " | ".join(
        str(cell)
        for cell in (
            f"{begun.get('answers_after') or '?'} / {begun['seconds']}",
            {True: "cold", False: "warm"}.get(begun.get("cold"), "?"),
            " / ".join(", ".join(map(str, cards)) if cards else "?" for cards in mib),
            ended.get("seconds", ""),
            counted,
            asked.get("length", 1),
            asked.get("own_rate", ""),
            asked.get("max_running_requests"),
            ", ".join(filter(None, asked.get("attention") or [])),
        )
    )


def save(out: Path, results: dict[str, Any]) -> None:
    """results.json, table.md and one archive of logs and metrics."""
    (WORK / "results.json").write_text(json.dumps(results, indent=1, default=str))
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(WORK / "results.json", out / "results.json")
    (out / "table.md").write_text("\n".join(rows(results)) + "\n")
    if (WORK / "ledger").is_dir():
        report.write(ledger.read(WORK / "ledger"), out)
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for folder in ("logs", "metrics", "ledger"):
            if (WORK / folder).is_dir():
                archive.add(WORK / folder, folder)


def main() -> int:
    """Run the steps that are asked for and not done yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--tp", type=int, default=1, help="cards a configuration has")
    parser.add_argument("--gigabytes", type=float, default=24, help="size of the checkpoint of the step large")
    parser.add_argument("--again", action="store_true", help="also steps that are done")
    parser.add_argument("--standin", action="store_true", help="a stand-in engine")
    arguments = parser.parse_args()
    wanted = arguments.steps.split(",")
    if unknown := [name for name in wanted if name not in STEPS]:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if importlib.util.find_spec("pyinfra") is None:
        parser.error("pyinfra is not there: put the packages of requirements/control.txt on the path")
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ["PYINFRA_PROGRESS"] = "off"
    WORK.mkdir(parents=True, exist_ok=True)
    programs = Path("/usr/local/bin")
    if not Path("/run/systemd/system").is_dir():
        units.install(programs)
    arguments.cards = len(nvidia_smi("--query-gpu=index"))
    if arguments.tp > max(1, arguments.cards):
        parser.error(f"--tp {arguments.tp}: this machine has {arguments.cards} cards")
    results: dict[str, Any] = read_object(WORK / "results.json") or {}
    results["machine"] = {
        "date": time.strftime("%Y-%m-%d"),
        "cards": nvidia_smi("--query-gpu=index,name,driver_version,memory.total"),
    }
    failed = False
    for name in wanted:
        if results.get(name, {}).get("outcome") == "ok" and not arguments.again:
            continue
        begin = time.monotonic()
        result: dict[str, Any] = {"outcome": "ok", "found": {}}
        try:
            STEPS[name](arguments, result["found"])
        except Exception as error:  # the other steps still tell something
            result |= {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
            if not isinstance(error, Wrong):
                result["where"] = traceback.format_exc()[-1500:]
        result["seconds"] = round(time.monotonic() - begin, 1)
        failed |= result["outcome"] != "ok"
        results[name] = result
        print(f"{result['outcome']:<7} {name} ({result['seconds']} s) {result.get('why', '')[:3000]}", flush=True)
        save(arguments.out, results)
    save(arguments.out, results)
    print("\n".join(rows(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
