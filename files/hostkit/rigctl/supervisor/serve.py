"""`rigctl serve`: the main process of a serving unit. Checks, starts an engine, follows its load, accepts, watches.

It owns no state: the unit holds the command line, systemd the life cycle, and files in /run and /var/lib what happened.
"""

import argparse
import os
import re
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rigctl.checkpoints.precheck import identities
from rigctl.contract import layout
from rigctl.contract.foreign import one_line
from rigctl.contract.happened import record_text
from rigctl.errors import RigctlError
from rigctl.notification import notify
from rigctl.supervisor import ended, prechecks
from rigctl.supervisor.activity import Patience, measure, members
from rigctl.supervisor.deaths import Deaths, exit_text
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, api_key
from rigctl.supervisor.engine_log import EngineLog, RunFile
from rigctl.supervisor.metrics_file import publish
from rigctl.supervisor.readiness import NotAccepted, accept
from rigctl.supervisor.specification import Specification
from rigctl.supervisor.watchdog import Watch, shared_port

POLL_SECONDS = 0.1
WARM_UP_POLL_SECONDS = 1.0
TICK_SECONDS = 1.0
SAY_SECONDS = 10.0  # between two signs of life to systemd
EXTEND_SECONDS = 120
ENGINES_WORDS = re.compile(r"(the engine ended by itself.*?\): (?:[\w.]*(?:Error|Exception): )?).*", re.DOTALL)
"""What an engine said at its end, behind the kind of its error."""
FOR_ALL = r"\1(`rigctl status` as root says more)"
"""Instead of what an engine says of a request: every user can read a unit's status."""
ALIVE = "WATCHDOG=1"  # wanted also while the unit stops: systemd counts on until the end (sd_notify(3))
STATUS_LETTERS = 1000
GIVE_UP = 78  # the unit's RestartPreventExitStatus=: another try would end the same
# systemd takes an end by one of the first three for a stop that was asked for (systemd.service(5), SuccessExitStatus=).
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
SENT = {0, -1, -6, 0x80}  # SI_USER, SI_QUEUE, SI_TKILL, SI_KERNEL of asm-generic/siginfo.h
LARGEST_PID = 1 << 22  # PID_MAX_LIMIT of linux/threads.h

T = TypeVar("T")


def received_within(seconds: float) -> signal.struct_siginfo | None:
    """The signal of SIGNALS that came within that time, which are blocked.

    CPython's sigtimedwait that a stop and continue interrupts (SIGSTOP, a freezer, a debugger) and that finds its time
    over returns memory that nobody has set (3.11 to 3.13, tests/unit/test_serve.py), such as a SIGHUP: what the kernel
    cannot have written there is none.
    """
    received = signal.sigtimedwait(SIGNALS, seconds)
    if received is None or received.si_signo == signal.SIGCHLD:
        return received
    sent = received.si_signo in SIGNALS and received.si_code in SENT and received.si_errno == 0
    return received if sent and 0 <= received.si_pid <= LARGEST_PID else None


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("serve", help="run an engine as the main process of its unit (used by systemd)")
    parser.add_argument("specification", type=Path)
    parser.add_argument("argv", nargs="+", help="the engine's command line, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the engine ends or systemd stops the unit. Exit code 0: stopped, 1: try again, 78: do not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    specification = None
    try:
        specification = Specification.read(arguments.specification)
        return Supervisor(specification, arguments.argv, api_key(specification.unit)).run()
    except RigctlError as error:
        if specification is not None:
            ended.note(specification.runtime, "cause.json", {"cause": str(error)})
        notify(f"STATUS={one_line(error, STATUS_LETTERS)}")
        print(error, flush=True)
        return GIVE_UP


def secret_variables() -> dict[str, str]:
    """Variables of the engine that lie in the unit's credentials: in no unit file, command line or log.

    Raises RigctlError for one that cannot be read.
    """
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    try:
        return {
            path.name.removeprefix(layout.VARIABLE_CREDENTIAL): path.read_text().strip()
            for path in (Path(directory).glob(f"{layout.VARIABLE_CREDENTIAL}*") if directory else ())
        }
    except (OSError, ValueError) as error:
        raise RigctlError(f"a secret of this configuration cannot be read: {error}; deploy again") from None


class Stop(Exception):
    """systemd stops the unit."""


class Failure(Exception):
    """The run has failed; the text is what the operator reads. again: another try may well succeed."""

    def __init__(self, cause: str, *, again: bool = False) -> None:
        super().__init__(cause)
        self.again = again


class Supervisor:
    """One run of one engine."""

    def __init__(self, specification: Specification, argv: list[str], key: str | None) -> None:
        self._specification, self._argv, self._key = specification, argv, key
        self._engine = Engine(specification, key)
        self._process: subprocess.Popen[bytes] | None = None
        file = RunFile(specification.logs, specification.limits.kept_runs, specification.limits.run_log_mib)
        self._secrets = secret_variables()
        masked = [*filter(None, (key, *self._secrets.values()))]
        self._log = EngineLog(specification.engine, specification.harmless_log, masked, file)
        self._patience = Patience(specification.limits)
        self._deaths = Deaths()
        self._said = (0.0, "")
        # What started.json will say.
        self._facts: dict[str, Any] = {
            "digest": specification.digest,
            "same_as": specification.same_as,
            "release": specification.release,
        }
        self._accepted = False
        self._frozen = False

    def run(self) -> int:
        """The whole run, from the checks to the end of the engine."""
        earlier = ended.taken_up(self._specification)
        ended.clear(self._specification)
        self._specification.runtime.remove("cause.json")
        try:
            self._back_off(earlier)
            self._check()
            self._start()
            self._until_ready()
            self._accept()
            self._watch()
        except Stop:
            self._notify("STOPPING=1", "draining and stopping the engine")
            self._end(polite=True)
            return 0
        except (Failure, RigctlError) as error:
            return self._failed(str(error), earlier, again=isinstance(error, Failure) and error.again)
        except OSError as error:  # such as a full disk
            return self._failed(f"{error.filename or 'this host'}: {error.strerror or error}", earlier)
        except Exception as error:  # a fault of ours: the engine is still ended in order, and the cause written down
            traceback.print_exc()
            return self._failed(f"the supervisor failed: {error!r}; `rigctl doctor` packs a report", earlier)

    def _failed(self, cause: str, earlier: list[str], *, again: bool = False) -> int:
        limits, cause = self._specification.limits, one_line(cause, STATUS_LETTERS)
        # A first start that is not accepted would fail again; one that follows a crash may have met its remains.
        retry = (again or self._accepted or bool(earlier)) and len(earlier) < limits.restarts
        if not retry and earlier:
            cause = f"{cause} (given up after {len(earlier) + 1} failures in a row)"
        last = {"cause": cause, "last_words": [*self._log.last_words]}
        ended.note(self._specification.runtime, "cause.json", last)
        self._notify("STOPPING=1", cause)
        self._end(polite=not self._frozen)
        print(f"{self._specification.name}: {cause}", flush=True)
        return 1 if retry else GIVE_UP

    def _back_off(self, earlier: list[str]) -> None:
        limits = self._specification.limits
        if not earlier:
            return
        if len(earlier) > limits.restarts:
            raise Failure(f"the last: {earlier[-1]}")
        delay = min(limits.restart_delay_seconds * 2 ** (len(earlier) - 1), limits.restart_delay_limit_seconds)
        end = time.monotonic() + delay
        while (left := end - time.monotonic()) > 0:
            self._say(f"waiting {delay:.0f} s before restart {len(earlier)} of {limits.restarts}; {earlier[-1]}")
            self._pause(min(left, TICK_SECONDS))

    def _check(self) -> None:
        self._say("checking")
        checked = self._meanwhile(lambda: dict(prechecks.run_all(self._specification)), lambda: "checking")
        for name, outcome in checked.items():
            print(f"pre-check {name}: {outcome}", flush=True)
        self._facts |= {"prechecks": checked, "checkpoints": identities(self._specification)}

    def _start(self) -> None:
        environment = {**os.environ, **self._secrets}
        environment.pop("NOTIFY_SOCKET", None)  # the engine must not talk to systemd in our place
        environment.pop("WATCHDOG_PID", None)
        Path(environment.get("HOME", "/")).mkdir(parents=True, exist_ok=True)  # the release's own cache
        argv = [*self._argv, *self._key_options(environment)]
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                preexec_fn=_unblock,  # noqa: PLW1509  # no thread of ours holds a lock here
            )
        except OSError as error:
            raise Failure(f"{argv[0]} cannot be run: {error.strerror}; deploy again") from None
        finally:
            os.close(writer)
        self._log.follow(reader)
        threading.Thread(target=self._sample, daemon=True).start()

    def _key_options(self, environment: dict[str, str]) -> list[str]:
        """Give the engine its API key where others cannot read it: never in a command line."""
        if self._specification.api_key and not self._key:
            raise Failure("the API key is empty or cannot be read; put one into the operator's api_key_file and deploy")
        if not self._key:
            return []
        if self._specification.engine == "vllm":
            environment["VLLM_API_KEY"] = self._key
            return []
        # SGLang takes a key on its command line or in a file of arguments (server_args_config_parser.py).
        quoted = self._key.replace("'", "''")
        self._specification.runtime.write("engine.yaml", f"api-key: '{quoted}'\n".encode(), 0o600)
        return ["--config", f"{self._specification.runtime}/engine.yaml"]

    def _sample(self) -> None:
        """Look at the engine's activity until it is accepted; on a thread, since nvidia-smi can take a second."""
        while not self._accepted:
            pids = members()
            self._deaths.follow(pids)
            self._patience.observe(measure(pids, self._specification.gpus))
            time.sleep(self._specification.limits.sample_seconds)

    def _until_ready(self) -> None:
        begun = time.monotonic()
        while not self._meanwhile(self._engine.ready, lambda: self._load_text(begun)):
            # Every question to one that warms up is two lines in its log (SGLang, minutes on a large model).
            self._pause(WARM_UP_POLL_SECONDS if self._engine.listening else POLL_SECONDS)
            self._say(self._load_text(begun))
        self._facts |= {"noticed_at": round(time.time(), 3), "load_seconds": round(time.monotonic() - begun, 2)}
        self._ours()

    def _ours(self) -> None:
        """What answers must be the engine of this unit: another one on the same port would be accepted in its place."""
        if shared := shared_port(self._specification):
            raise Failure(shared)

    def _load_text(self, begun: float) -> str:
        self._patience.heard(self._log.news)
        if verdict := self._patience.verdict():
            self._frozen = True
            raise Failure(f"{verdict}; it was {self._log.phase}")
        silent = self._patience.silent_seconds
        quiet = f", silent for {silent:.0f} s but at work" if silent > 60 else ""
        return f"{self._log.phase} ({time.monotonic() - begun:.0f} s{quiet})"

    def _accept(self) -> None:
        """Ask the engine to prove itself, write down what it proved, and only then tell systemd that it is ready."""
        begun = time.monotonic()
        try:
            proved = self._meanwhile(lambda: accept(self._engine), lambda: f"accepting: {self._load_text(begun)}")
        except NotAccepted as error:
            raise Failure(f"not accepted: {error}") from None
        self._ours()
        self._accepted = True
        self._deaths.begin_service()
        specification, now = self._specification, time.monotonic()
        self._facts |= {"accepted_at": int(time.time()), "accepted_monotonic": now, "proved": proved}
        self._facts["probe_seconds"] = round(now - begun, 2)
        specification.runtime.write("started.json", record_text(self._facts))
        ended.note(specification.state, "accepted.json", {"at": int(time.time()), "digest": specification.digest})
        specification.runtime.remove("engine.yaml")
        counted = proved.get("speculation", {})
        drafts = f", {counted['accepted']}/{counted['drafted']} drafted tokens accepted" if "drafted" in counted else ""
        line = f"accepted {self._facts['load_seconds']:.1f} s after the start, probes {now - begun:.1f} s{drafts}"
        self._notify("READY=1", line)
        print(f"{specification.name}: {line}", flush=True)

    def _watch(self) -> NoReturn:
        watch = Watch(self._engine)
        while True:
            self._deaths.follow(members())
            end = time.monotonic() + self._specification.limits.watch_seconds
            while (left := end - time.monotonic()) > 0:
                self._say(self._said[1])
                self._pause(min(left, SAY_SECONDS))
            self._meanwhile(watch.round, lambda: self._said[1], 0.2)
            ended.note(self._specification.runtime, "watch.json", watch.report())
            with suppress(OSError):  # a full /run is no reason to stop serving
                publish(self._specification, watch)
            if verdict := watch.verdict():
                self._frozen = True
                raise Failure(verdict)
            self._say(watch.text())

    def _meanwhile(self, work: Callable[[], T], text: Callable[[], str], step: float = 0.02) -> T:
        """Do blocking work on a thread; stay able to stop, to notice the engine's end and to talk to systemd."""
        outcome: Future[T] = Future()

        def call() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # raised again by the one who waits
                outcome.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        while not wait([outcome], step).done:
            self._pause(0)
            self._say(text())
        if outcome.exception() is not None:
            self._pause(0)  # the engine's own end explains more than the connection it broke
        return outcome.result()

    def _pause(self, seconds: float) -> None:
        """Wait; raises Stop when systemd stops the unit, Failure when the engine has ended."""
        received = received_within(seconds)
        if received is not None and received.si_signo != signal.SIGCHLD:
            if received.si_pid == os.getppid():  # systemd: a stop, or `systemctl kill`
                raise Stop
            name, unit = signal.Signals(received.si_signo).name, self._specification.unit
            by = f"process {received.si_pid} ({ended.command(received.si_pid)})" if received.si_pid else "the kernel"
            raise Failure(f"{by} sent {name} to the supervisor; to stop it, use `systemctl stop {unit}`", again=True)
        if self._process is not None and (status := self._process.poll()) is not None:
            self._log.catch_up()
            during = "" if self._accepted else f" while {self._log.phase}"
            failed = "a process of its own had failed" if self._log.child_failed else None
            first = self._deaths.first(self._process.pid) or failed
            # SGLang kills itself then: who sent the signal is no question.
            how = exit_text(status) if status >= 0 or not first else ""
            how = ", ".join(filter(None, (how, first and f"after {first}")))
            said = f": {self._log.last_error}" if self._log.last_error else ""
            # A power loss or a kill cuts what an engine has just compiled, and no restart mends that.
            if self._log.of_cache and (cache := os.environ.get("XDG_CACHE_HOME")):
                said += f"; if it stays so, what it had compiled is damaged: `rm -rf {cache}`, and start again"
            raise Failure(f"the engine ended by itself{during} ({how}){said}")

    def _say(self, text: str) -> None:
        """Tell systemd what goes on, at once when the phase is another and else every few seconds."""
        at, before = self._said
        now = time.monotonic()
        if now - at >= SAY_SECONDS or text.split("(", maxsplit=1)[0] != before.split("(")[0]:
            self._notify(ALIVE if self._accepted else f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1000000}", text)

    def _notify(self, state: str, text: str) -> None:
        self._said = (time.monotonic(), text)
        notify(f"{state}\nSTATUS={one_line(ENGINES_WORDS.sub(FOR_ALL, text), STATUS_LETTERS)}")

    def _end(self, *, polite: bool) -> None:
        """Drain, ask politely, then end every process that is left."""
        limits, process = self._specification.limits, self._process
        if process is not None and process.poll() is None and polite:
            own = self._specification.drain != "none"
            if self._accepted and not own:
                self._drain(limits.drain_seconds)
            patience = limits.stop_seconds + (limits.drain_seconds if self._accepted and own else 0)
            asked = time.monotonic()
            process.terminate()
            while process.poll() is None and time.monotonic() < asked + patience:
                notify(ALIVE)
                if not self._accepted:
                    process.terminate()  # vLLM 0.32.0 loses one that comes while it loads, and serves on
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TICK_SECONDS)
            ended_by_itself = "ended" if process.poll() is not None else "is killed: it did not end"
            print(f"the engine {ended_by_itself} within {time.monotonic() - asked:.2f} s of the stop", flush=True)
        killed = ended.end_group(polite_seconds=5 if polite else 0)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if killed:
            print(f"ended what the engine left running: {'; '.join(killed)}", flush=True)
        self._log.finish()

    def _drain(self, seconds: float) -> None:
        """Wait for running requests; this engine cannot refuse new ones meanwhile."""
        end = time.monotonic() + seconds
        with suppress(*BAD_ANSWERS):
            while time.monotonic() < end and (now := self._engine.metrics()) and now.running + now.waiting:
                self._notify(f"STOPPING=1\n{ALIVE}", f"draining: {now.running} running, {now.waiting} waiting")
                time.sleep(0.5)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
