"""Runs inside the box: tries to break each systemd limit from a small transient unit, prints JSON.

Fed to the box's own Python on standard input; standard library only. Each attempt exits 0 when it got through
(not enforced) and 77 when it was refused; MemoryMax may also kill it. A refusal counts only if the same
attempt gets through without the limit.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REFUSED = 77

# name: (properties, attempt). The attempt raises OSError or MemoryError when refused.
ATTEMPTS: dict[str, tuple[list[str], str]] = {
    "MemoryMax": (["MemoryMax=40M", "MemorySwapMax=0"], "b'x' * (160 << 20)"),
    "TasksMax": (
        ["TasksMax=4"],
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: time.sleep(0.5); os._exit(0)",
    ),
    "CPUQuota": (
        ["CPUQuota=10%"],
        "import time\nfrom pathlib import Path\n"
        "end = time.monotonic() + 0.4\nwhile time.monotonic() < end: pass\n"
        "for line in Path('/proc/self/cgroup').read_text().splitlines():\n"
        "    for base in ('', '/cpu', '/cpu,cpuacct'):\n"
        "        stat = Path('/sys/fs/cgroup' + base + line.split(':', 2)[2]) / 'cpu.stat'\n"
        "        counts = dict(map(str.split, stat.read_text().splitlines())) if stat.exists() else {}\n"
        "        if counts.get('nr_throttled', '0') != '0': raise OSError('throttled')",
    ),
    "IPAddressDeny": (
        ["IPAddressDeny=any"],
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    ),
    "DevicePolicy": (["DevicePolicy=strict", "DeviceAllow=/dev/null rw"], "open('/dev/full', 'rb')"),
    "RestrictAddressFamilies": (
        ["RestrictAddressFamilies=AF_UNIX"],
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    ),
    "SystemCallFilter": (["SystemCallFilter=~uname", "SystemCallErrorNumber=EPERM"], "import os\nos.uname()"),
    "MemoryDenyWriteExecute": (["MemoryDenyWriteExecute=yes"], "import mmap\nmmap.mmap(-1, 4096, prot=7)"),
    "ProtectSystem": (["ProtectSystem=strict"], "open('/usr/.kimi-rig-probe', 'w').close()"),
    "ProtectHome": (["ProtectHome=yes"], "import os\nif not os.listdir('/root'): raise OSError"),
    "PrivateUsers": (
        ["PrivateUsers=yes"],
        "if '4294967295' in open('/proc/self/uid_map').read(): pass\nelse: raise OSError",
    ),
    "PrivateNetwork": (
        ["PrivateNetwork=yes"],
        "if len(open('/proc/net/dev').read().splitlines()) == 3: raise OSError",
    ),
    "PrivateDevices": (["PrivateDevices=yes"], "import os\nos.stat('/dev/net')"),
    "ProtectProc": (
        ["ProtectProc=invisible", "User=nobody"],
        "open('/proc/1/cmdline')",
    ),
    "NoNewPrivileges": (
        ["NoNewPrivileges=yes"],
        "if 'NoNewPrivs:\\t1' in open('/proc/self/status').read(): raise OSError",
    ),
}

# Settings that give something rather than refuse it: the attempt exits 0 when it is there.
GRANTS: dict[str, tuple[list[str], str]] = {
    "LoadCredential": (
        ["SetCredential=probe:x"],
        "import os\nif open(os.environ['CREDENTIALS_DIRECTORY'] + '/probe').read() != 'x': raise OSError('wrong')",
    ),
    "LimitMEMLOCK": (
        ["LimitMEMLOCK=infinity"],
        "import resource\n"
        "got = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]\n"
        "if got != resource.RLIM_INFINITY: raise OSError(f'only {got} bytes may be locked')",
    ),
    "sysctl": (
        [],
        "path = '/proc/sys/vm/swappiness'\nvalue = open(path).read()\nopen(path, 'w').write(value)",
    ),
}

CAP_SYS_TIME = 25  # linux/capability.h


def program(attempt: str) -> list[str]:
    """Argv that makes the attempt."""
    body = "\n".join(f"    {line}" for line in attempt.splitlines())
    caught = f"    import sys\n    print(error, file=sys.stderr)\n    sys.exit({REFUSED})"
    return [sys.executable, "-c", f"try:\n{body}\nexcept (OSError, MemoryError) as error:\n{caught}"]


def run(command: list[str]) -> tuple[int, str]:
    """Exit status (128 + n, or -n, for signal n) and last line on standard error."""
    done = subprocess.run(
        command, capture_output=True, errors="replace", stdin=subprocess.DEVNULL, check=False, timeout=20
    )
    lines = done.stderr.strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def run_unit(properties: list[str], attempt: str) -> tuple[int, str]:
    """The attempt in a transient unit of its own."""
    options = [f"--property={item}" for item in properties]
    return run(["systemd-run", "--quiet", "--wait", "--pipe", "--collect", *options, "--", *program(attempt)])


def judge(name: str) -> dict[str, object]:
    """`enforced` is true, false, or null when the attempt says neither; `note` tells what happened."""
    if name in GRANTS:
        code, note = run_unit(*GRANTS[name])
        return {"enforced": code == 0, "note": "works" if code == 0 else note}
    properties, attempt = ATTEMPTS[name]
    code, note = run_unit(properties, attempt)
    if code == 0:
        return {"enforced": False, "note": f"{' '.join(properties)} did not stop it"}
    killed = name == "MemoryMax" and code in (128 + signal.SIGKILL, 255)
    if code != REFUSED and not killed:
        return {"enforced": None, "note": f"exit {code}: {note}"}
    control, _ = run(program(attempt))
    if control != 0:
        return {"enforced": None, "note": f"refused without the limit too: {note}"}
    return {"enforced": True, "note": note or ("killed" if killed else "refused")}


def may_set_clock(status: str) -> bool:
    """From the text of /proc/self/status; trying it would set the computer's clock."""
    bounding = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:"))
    return bool(int(bounding, 16) >> CAP_SYS_TIME & 1)


def main() -> None:
    names = [*ATTEMPTS, *GRANTS]
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = dict(zip(names, pool.map(judge, names), strict=True))
    clock = may_set_clock(Path("/proc/self/status").read_text(encoding="utf-8"))
    json.dump({"kernel": os.uname().release, "clock": clock, "limits": results}, sys.stdout)


if __name__ == "__main__":
    main()
