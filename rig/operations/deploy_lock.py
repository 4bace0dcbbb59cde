"""One deploy at a time per host: a lock on the host that lives exactly as long as the deploying process.

It is an flock held by a remote command whose standard input is this process: when the deploy ends, however it ends,
the command ends and the kernel lets the lock go. No stale lock can stay behind.
"""

import os
import shlex
from datetime import UTC, datetime
from subprocess import PIPE, Popen
from typing import Any

from pyinfra import host
from pyinfra.api import operation
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import OperationError
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from rig.operations import locks
from rig.operations.common import Commands, operator, refuse
from rigctl.contract import layout

LOCK = layout.DEPLOY_LOCK
ORPHAN_SECONDS = 600
_held: list[Any] = []


@operation()
def deploy_lock() -> Commands:
    """Hold the host's deploy lock until this process ends; refuse, naming owner and age, when another holds it."""
    if host.state.is_executing and (answer := _acquire()) != "held":
        yield from refuse(f"another deploy is at work on this host: {answer}. Wait for it, or end it there")
        return
    host.noop("the deploy lock is held while the deploy runs")


def lock_script(owner: str) -> str:
    """Takes the lock, says "held" and keeps it until standard input ends; else says who has it and for how long.

    A command of a killed deploy (apt-get) may still be at work on the host: waits for it first.
    """
    orphan = f"a command of a killed deploy still runs there ({ORPHAN_SECONDS} s waited)"
    hold = f"echo {shlex.quote(owner)} > {LOCK}.owner; echo held; cat >/dev/null"
    known = f"$(cat {LOCK}.owner), for $(( $(date +%s) - $(stat -c %Y {LOCK}.owner) )) s"
    return (
        f"umask 022; {locks.place_made()}; {locks.opened(9, LOCK)}; {locks.opened(8, layout.AT_WORK)}; "
        f"if flock -n 9; then if flock -w {ORPHAN_SECONDS} 8; then exec 8>&-; {hold}; "
        f'else echo "{orphan}: $({locks.held_by(layout.AT_WORK)})"; fi; '
        f'else echo "$([ ! -e {LOCK}.owner ] || echo "{known}; ")$({locks.held_by(LOCK)})"; fi'
    )


def _acquire() -> str:
    owner = f"{operator()} (process {os.getpid()}) since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    given: dict[str, Any] = dict(host.current_op_global_arguments or {})
    arguments: Any = {key: value for key, value in given.items() if key in CONNECTOR_ARGUMENT_KEYS}
    extract_control_arguments(arguments)
    command = make_unix_command_for_host(host.state, host, StringCommand(lock_script(owner)), **arguments)
    connector = host.connector
    if isinstance(connector, SSHConnector):
        if connector.client is None:
            raise OperationError(f"{host.name} is not connected: the deploy lock cannot be held")
        channel = connector.client.exec_command(command.get_raw_value())
        _held.append(channel)
        return str(channel[1].readline()).strip()
    if isinstance(connector, LocalConnector):
        process = Popen(["sh", "-c", command.get_raw_value()], stdin=PIPE, stdout=PIPE, errors="replace")
        _held.append(process)
        return (process.stdout.readline() if process.stdout else "").strip()
    return "held"  # connectors without a machine behind them (@fake) have nothing to lock
