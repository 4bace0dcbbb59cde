#!/bin/sh
# Keeps one box where systemd is not PID 1: keeper.sh CGROUP[:CGROUP...] systemd-nspawn ARGUMENT...
# Each start gets control groups of its own (two boxes in one would stop each other's services);
# exit status 133 is systemd-nspawn's word for "the box wants to reboot".
groups=$1
shift
while :; do
    IFS=:
    for group in $groups; do
        [ -d "$group" ] && find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
        mkdir -p "$group" && echo "+cpu +memory +pids" 2>/dev/null >"${group%/*}/cgroup.subtree_control"
    done
    unset IFS
    # shellcheck disable=SC2016
    sh -c 'IFS=:; for group in $1; do echo $$ >"$group/cgroup.procs"; done; unset IFS; shift; exec "$@"' box "$groups" "$@"
    status=$?
    [ "$status" -eq 133 ] || exit "$status"
done
