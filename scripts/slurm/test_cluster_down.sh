#!/usr/bin/env bash
# End the Slurm that test_cluster_up.sh started in DIR: its jobs, processes and network.
set -u
[ $# = 1 ] || { echo "test_cluster_down: usage: test_cluster_down.sh DIR" >&2; exit 2; }
dir=$1
[ -e "$dir/pids" ] || { echo "test_cluster_down: no Slurm runs in $dir"; exit 0; }
export SLURM_CONF=$dir/slurm.conf
alive() { [ -r "/proc/$1/status" ] && ! grep -q '^State:.Z' "/proc/$1/status"; }
wait_for() { for _ in $(seq 1 50); do alive "$1" || return 0; sleep 0.1; done; return 1; }

jobs=$(timeout 10 squeue -h -o %A 2>/dev/null)
if [ -n "$jobs" ]; then # shellcheck disable=SC2086
    timeout 10 scancel --full --signal=KILL $jobs >/dev/null 2>&1
    timeout 10 scancel $jobs >/dev/null 2>&1
    for _ in $(seq 1 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
fi
tac "$dir/pids" | while read -r name pid; do
    case "$(cat "/proc/$pid/comm" 2>/dev/null)" in # only if the process id still belongs to that daemon
        "${name%%.*}"*) kill -TERM "$pid"; wait_for "$pid" || kill -KILL "$pid" ;;
    esac
done
# The daemon of a step outlives slurmd if its task hangs. Its environment names this configuration.
for pid in $(pgrep -x slurmstepd); do
    if { tr '\0' '\n' <"/proc/$pid/environ"; } 2>/dev/null | grep -qxF "SLURM_CONF=$dir/slurm.conf"; then
        kill -KILL "$pid"
    fi
done
for i in $(seq 1 "$(cat "$dir/nodes")"); do
    ip link del "mfp8v$i" 2>/dev/null
    ip netns del "megafp8-node$i" 2>/dev/null
done
ip link del megafp8br0 2>/dev/null
rm -f "$dir/pids"
echo "test_cluster_down: $dir is down"
