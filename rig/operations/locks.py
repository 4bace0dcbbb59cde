"""Shell for root's lock files: whoever can open one can lock it for ever, so it is closed to others from the start."""

import shlex

from rigctl.contract import layout


def place_made() -> str:
    """Make the directory of lock files and of other marks of root's that end with the boot."""
    return f"mkdir -p {layout.RUNTIME}"


def opened(descriptor: int, path: str) -> str:
    """Open a lock file, closed to others."""
    name = shlex.quote(path)
    return f"umask 077; exec {descriptor}>>{name}; umask 022"


def held_by(path: str) -> str:
    """Print who holds a lock: pid, user, unit and command of each process, by the kernel's word (proc(5), fdinfo).

    To be asked by one that does not hold it.
    """
    name = shlex.quote(path)
    return (
        f"for f in $(find /proc/[0-9]*/fd -lname {name} 2>/dev/null); do p=${{f#/proc/}}; p=${{p%%/*}}; "
        "grep -qs FLOCK /proc/$p/fdinfo/${f##*/} || continue; "
        'printf "process %s of %s, unit %s: %s; " "$p" "$(stat -c %U /proc/$p)" '
        '"$(sed "s|.*/||" /proc/$p/cgroup | tail -n 1)" '
        "\"$(tr '\\0\\n' '  ' < /proc/$p/cmdline | tr -cd '[:print:]' | cut -c1-100)\"; done"
    )
