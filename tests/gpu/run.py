"""SGLang on real GPUs through the product's own parts, on a machine without network or systemd that is thrown away.

python3 tests/gpu/run.py OUT [--steps NAME,...] [--again] [--standin]

Wheels of tests/gpu/wheels.py lie in /opt/carry; python3 holds the packages of requirements/control.txt. Each step
writes what it found at once; one that is done is left alone unless --again, so an interrupted run goes on where it was.
The table comes last, OUT gets at most eight files. --standin: a stand-in engine answers, for a rehearsal without GPUs.
Exit code 0: every step did as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files/hostkit")]

from rig.artifacts.units import unit_files
from rig.bench import ledger, report
from rig.bench.analysis import point
from rig.bench.collect import to_result
from rig.bench.sweeps import find_sweep, generator_path, host_sweep
from rig.bench.variants import derive
from rig.catalog.entries import Configuration, Listen
from rig.cli.converge import pyinfra
from rig.operations.benchmark import generator_environment
from rig.plan.host_plan import HostPlan, plan_from_facts
from rigctl.contract import layout
from rigctl.contract.limits import Limits
from rigctl.contract.sweep import CellResult, HostFacts
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.activity import gpu_memory
from rigctl.supervisor.engine_client import Engine, Speculation
from rigctl.supervisor.specification import named
from rigctl.tiny_kimi.automaton import CHAT, CONTENT
from rigctl.whole_files import read_object
from tests.gpu import standin_systemd as units
from tests.gpu.host_stage import inventory, read_facts, run
from tests.gpu.wheels import POINTER
from tests.support.tiny_kimi import predict_counters

WORK = Path("/var/lib/kimi-rig-gpu")
CARRY = Path("/opt/carry")
SHARED_CACHE = "/var/cache/kimi-rig-gpu"
GENERATOR_LOCK = f"{layout.LOCKS}/aiperf.txt"
STAGES = ("base", "hostkit", "engines", "checkpoints", "units")
CATALOGUE = ["sglang-base", "sglang-eagle3-aq-medai", "sglang-eagle3-custom", "sglang-eagle3-custom-current"]
DATA = {
    "catalogue_overlay": "gpu-proof.yaml",
    "configurations": CATALOGUE,
    "base_packages": [],
    "wheels": str(CARRY),
}
# Catalogue entry -> what its drafter does (rigctl tiny-kimi).
DRAFTS: dict[str, Any] = {
    "sglang-base": None,
    "sglang-eagle3-aq-medai": "never",
    "sglang-eagle3-custom": "always",
    "sglang-eagle3-custom-current": "half",
}
SHORT = {
    "sglang-base": "base",
    "sglang-eagle3-aq-medai": "never",
    "sglang-eagle3-custom": "always",
    "sglang-eagle3-custom-current": "half",
}
SUPERVISION = Limits(sample_seconds=2, drain_seconds=10, stop_seconds=30, restart_delay_seconds=2, gpu_wait_seconds=90)
HOLD_MIB = 8192
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

    @property
    def name(self) -> str:
        cards = "".join(map(str, self.gpus))
        return f"{SHORT[self.entry]}-{self.attention or 'default'}-tp{len(self.gpus)}-g{cards}"

    @property
    def drafter(self) -> Any:
        return DRAFTS[self.entry]


def configuration(plan: HostPlan, variant: Variant) -> Configuration:
    """The catalogue entry, reduced to the cards of this run."""
    entry = plan.serving[variant.entry]
    flags = {key: value for key, value in entry.flags.items() if key != "attention-backend"}
    if variant.attention:
        flags["attention-backend"] = variant.attention
    caches = {
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
            "max_running_requests": None if variant.unlimited else 32,
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
    plan = plan_from_facts({**group_data(), **DATA}, read_facts())
    serving = {variant.name: configuration(plan, variant) for variant in variants}
    environments = dict(plan.environments)
    if standin:
        for name, env in environments.items():
            release = env.release.model_copy(update={"launch": [str(ROOT / "tests/standin.py")]})
            environments[name] = replace(env, release=release)
    supervision = SUPERVISION.model_copy(update={"shared_memory": "50%"})
    data = plan.data.model_copy(update={"supervision": supervision})
    # The host stage does not run here: nothing of it is looked for before a start.
    bare: dict[str, Any] = {
        "kernel_arguments": (),
        "module_options": {},
        "sysctls": {},
        "governor": None,
        "disk_scheduler": {},
    }
    settings = replace(plan.settings, **bare, power_limit_w=None)
    return replace(plan, serving=serving, environments=environments, data=data, settings=settings)


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
            if re.search(r"sglang[.:]|standin\.py", line) and "rigctl" not in line and "standin_systemd" not in line:
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
    return read_object(named(name).runtime / "started.json") or {}


def last_words(name: str) -> str:
    log = units.STATE / f"kimi-{name}.service.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line for line in lines if re.search(r"Error|error:|pre-check|not accepted|ended by itself", line)]
    return " | ".join((told or lines)[-4:])[-1500:]


def start(variant: Variant) -> dict[str, Any]:
    """Start one; what the supervisor wrote down. Raises Wrong with the engine's last words."""
    begin = time.monotonic()
    code = units.start(f"kimi-{variant.name}.service")
    seconds = round(time.monotonic() - begin, 1)
    if code != 0:
        cause = (read_object(named(variant.name).state / "ended.json") or {}).get("cause")
        raise Wrong(f"not accepted after {seconds} s: {cause}: {last_words(variant.name)}")
    found = started(variant.name)
    return {
        "seconds": seconds,
        "load": found.get("load_seconds"),
        "proved": found.get("proved"),
        "checks": found.get("prechecks"),
    }


def counters(drafter: Any) -> list[int]:
    """Drafts, drafted and accepted tokens of the chat as rigctl derives them from SGLang's counters.

    They know the tokens that came out: what is accepted beyond the end of the turn is in vLLM's counters only.
    """
    expected = predict_counters(CHAT, drafter, 3)
    return [expected.drafts, expected.draft_tokens, expected.output_tokens - 1 - expected.drafts]


def ask(variant: Variant) -> dict[str, Any]:
    """One chat; text, counters against the prediction, the engine's own rate and settings."""
    specification = named(variant.name)
    engine = Engine(specification)
    before = engine.metrics().speculation or Speculation(0, 0, 0)
    message = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=512)["message"]
    found: dict[str, Any] = {"text": message.get("content") == CONTENT}
    expected = counters(variant.drafter) if variant.drafter else None
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
    return found


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


def judged(found: dict[str, Any], *, standin: bool = False) -> None:
    """Raise Wrong for what a life must not have. A stand-in says something else, and counts otherwise."""
    if "error" in found:
        raise Wrong(found["error"])
    asked = found["ask"]
    if not asked["text"] and not standin:
        raise Wrong("the text is not the model's")
    if asked.get("predicted") and asked["counted"] != asked["predicted"] and not standin:
        raise Wrong(f"counted {asked['counted']}, predicted {asked['predicted']}")
    if max(found["stop"]["mib"]) >= 1024:
        raise Wrong(f"still on the cards: {found['stop']['mib']} MiB")


# Steps: each fills `found` as it goes, so that a failure leaves what was found before it

Step = Callable[[argparse.Namespace, dict[str, Any]], None]


def deploy(_: argparse.Namespace, found: dict[str, Any]) -> None:
    """Environment, checkpoints and units by the product's own operations; a second look finds nothing to do."""
    location = run("python3", "-c", "import torch; print(torch.__file__)").strip()
    Path(POINTER).write_text(f"{Path(location).parents[1]}\n")
    shutil.copy(CARRY / "lock.txt", ROOT / "files/locks/gpu-proof-cp312.txt")
    folder = WORK / "inventory"
    shutil.rmtree(folder, ignore_errors=True)
    hosts = inventory(folder, **DATA)
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
    (env,) = plan_from_facts({**group_data(), **DATA}, read_facts()).environments.values()
    proof = sorted(Path(layout.PROOFS).glob("sglang*"))
    probed = json.loads(proof[0].read_text()) if proof else {}
    found |= {"environment": env.path, "version": probed.get("version"), "features": probed.get("features")}


def pairs(cards: int) -> list[list[Variant]]:
    """Lives that go on at once: both attention backends, on a card of their own where there are two."""
    rounds = []
    for entry in CATALOGUE:
        unlimited = DRAFTS[entry] == "half"
        first = Variant(entry, (0,), "triton", unlimited)
        second = Variant(entry, (1 if cards > 1 else 0,), None, unlimited)
        rounds += [[first, second]] if cards > 1 else [[first], [second]]
    return rounds


def lives(names: Iterable[str]) -> Step:
    """The step that lets these catalogue entries live on one card each."""

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        rounds = [group for group in pairs(arguments.cards) if group[0].entry in names]
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
                    judged(life, standin=arguments.standin)
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


def tensor(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """All cards as one: a worker killed, a restart, a switch, a stop."""
    cards = tuple(range(arguments.cards))
    if len(cards) < 2 and not arguments.standin:
        raise Wrong("needs two cards")
    first, second = (Variant(entry, cards, "triton") for entry in ("sglang-eagle3-custom", "sglang-base"))
    write_units([first, second], standin=arguments.standin)
    unit = f"kimi-{first.name}.service"
    found["before_mib"] = used_mib(cards)
    found["start"] = start(first)
    found["serving_mib"] = used_mib(cards)
    found["ask"] = ask(first)
    workers = [line for line in processes() if re.search(r"scheduler", line)]
    found["workers"] = workers
    if workers:
        victim = int(workers[-1].split()[0])
        main, begin = units.read(unit)["MainPID"], time.monotonic()
        os.kill(victim, 9)
        while units.read(unit)["MainPID"] == main and time.monotonic() - begin < 120:
            time.sleep(0.05)
        found["ended_after"] = round(time.monotonic() - begin, 2)
        found["cause"] = (read_object(named(first.name).state / "ended.json") or {}).get("cause")
        while units.read(unit)["ActiveState"] == "activating" and time.monotonic() - begin < 300:
            time.sleep(0.2)
        found["restarted"] = units.read(unit)["ActiveState"]
        found["restart_seconds"] = round(time.monotonic() - begin, 1)
        again = started(first.name)
        found["restart_proved"] = again.get("proved", {}).get("speculation")
        found["restart_checks"] = again.get("prechecks", {}).get("GPUs")
    begin = time.monotonic()
    found["switch"] = start(second)
    found["switch_seconds"] = round(time.monotonic() - begin, 1)
    found["displaced"] = {key: units.read(unit)[key] for key in ("ActiveState", "Result")}
    found["switch_mib"] = used_mib(cards)
    found["switch_ask"] = ask(second)
    found["stop"] = stop(second)
    keep_log(first.name)
    keep_log(second.name)
    found["processes"], found["shared_memory"] = processes(), shared_memory()
    if found.get("restarted", "active") != "active" or max(found["stop"]["mib"]) >= 1024 or found["processes"]:
        raise Wrong(
            f"restarted {found.get('restarted')}, on the cards {found['stop']['mib']}, left {found['processes']}"
        )


def generator(_: argparse.Namespace, found: dict[str, Any]) -> None:
    """The load generator's environment, by the product's own program from the wheels that are here."""
    plan = plan_from_facts({**group_data(), **DATA}, read_facts())
    shutil.copy(CARRY / "aiperf.txt", GENERATOR_LOCK)
    path, cache = generator_path(plan.data.ml_env), f"{plan.data.ml_env}/.cache"
    python = next(iter(plan.environments.values())).python
    described = generator_environment(path, python, GENERATOR_LOCK, cache, plan.data.wheels)
    begin = time.monotonic()
    run(layout.RIGCTL, "environment", "build", json.dumps(described.document()))
    found |= {"path": path, "seconds": round(time.monotonic() - begin, 1)}


def sweep(name: str, entries: Sequence[str]) -> Step:
    """The step that measures these catalogue entries on all cards as one, and adds the results to the ledger."""

    def step(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        cards = tuple(range(arguments.cards))
        variants = [Variant(entry, cards, "triton") for entry in entries]
        chosen = find_sweep(name)
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
        lengths = {"always": 4.0, "never": 1.0}
        for key, one in found["cells"].items():
            if one["length"] != lengths.get(key.split("-")[0], one["length"]):
                raise Wrong(f"{key}: acceptance length {one['length']}")
            if chosen.profile and not one["profile"]:
                raise Wrong(f"{key}: not profiled: {done.stdout[-1500:]}")

    return step


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
    "base": lives(["sglang-base"]),
    "never": lives(["sglang-eagle3-aq-medai"]),
    "always": lives(["sglang-eagle3-custom"]),
    "half": lives(["sglang-eagle3-custom-current"]),
    "gate": gate,
    "tensor": tensor,
    "generator": generator,
    "profile": sweep("profile", ["sglang-base", "sglang-eagle3-custom"]),
    "quick": sweep("quick", ["sglang-base", "sglang-eagle3-custom", "sglang-eagle3-aq-medai"]),
    "attention": sweep("attention-sglang", ["sglang-base"]),
    "nccl": sweep("nccl", ["sglang-base"]),
}


HEAD = (
    "| configuration | accepted after, s | MiB before / serving / after | stopped in, s | drafts / drafted / accepted |"
    " length | engine's rate | request limit | attention |"
)


def rows(results: dict[str, Any]) -> list[str]:
    """A table of lives, a line each, then a line for each step that failed."""
    lives: dict[str, dict[str, Any]] = {}
    for step, result in results.items():
        found = result.get("found", {}) if step != "machine" else {}
        lives |= {name: life for name, life in found.items() if isinstance(life, dict) and "ask" in life}
        if "ask" in found:
            lives[f"{step}, first"] = found
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    lines += [f"| {name} | {_summary(life)} |" for name, life in lives.items()]
    failed = [(name, one) for name, one in results.items() if name != "machine" and one["outcome"] != "ok"]
    return lines + [f"{name} failed: {one['why'][:300]}" for name, one in failed]


def _summary(life: dict[str, Any]) -> str:
    asked, mib = life["ask"], [life.get("before_mib"), life.get("serving_mib"), life["stop"]["mib"]]
    counted = " / ".join(map(str, asked["counted"])) if "counted" in asked else "no drafter"
    return " | ".join(
        str(cell)
        for cell in (
            life["start"]["seconds"],
            " / ".join(", ".join(map(str, cards)) if cards else "?" for cards in mib),
            life["stop"]["seconds"],
            counted,
            asked.get("length", 1),
            asked.get("own_rate", ""),
            asked.get("max_running_requests"),
            (asked.get("attention") or [None])[0],
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
