#!/usr/bin/env bash
# Start a real Slurm on this machine, for tests: nodes have addresses and host names of their own.
#
#   scripts/slurm/test_cluster_up.sh DIR [NODES=2] [CPUS=2] [GPUS=0]
#   . DIR/env                                    then sbatch, srun, squeue and scontrol use it
#   scripts/slurm/test_cluster_down.sh DIR
#
# Each node is a slurmd in its own network and UTS namespace on the bridge megafp8br0 (10.88.0.0/24).
# There is no systemd, no cgroup and no accounting; GPUs are imitated by null devices. Partition `high`
# preempts partition `batch` after a GraceTime. On the nodes DIR/image is a folder with the files of this
# machine, which bubblewrap takes for an unpacked image. The script needs root, and on Debian 12:
#   apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2
# All its files are in DIR; process ids are in DIR/pids.
set -euo pipefail
die() { echo "test_cluster_up: error: $*" >&2; exit 1; }
[ $# -ge 1 ] || die "usage: test_cluster_up.sh DIR [NODES] [CPUS] [GPUS]"
nodes=${2:-2}; cpus=${3:-2}; gpus=${4:-0}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
net=10.88.0
port=${TEST_CLUSTER_PORT:-17000}

[ "$(id -u)" = 0 ] || die "must run as root"
for name in slurmctld slurmd sbatch munged ip nsenter; do
    command -v "$name" >/dev/null || die "$name not found (Debian: apt-get install -y \
--no-install-recommends slurmctld slurmd slurm-client munge iproute2)"
done
mkdir -p "$1"; dir=$(cd "$1" && pwd)
[ ! -s "$dir/pids" ] || die "$dir/pids exists, so that a cluster may run there: end it with test_cluster_down.sh $dir"
! ip link show megafp8br0 >/dev/null 2>&1 || die "the bridge megafp8br0 exists: another test cluster runs"
mkdir -p "$dir"/{ctld,log,spool,munge,munge-run}
chmod 755 "$dir" "$dir/munge-run"; chmod 700 "$dir/munge"
host=$(hostname -s)
echo "$nodes" >"$dir/nodes"
: >"$dir/pids"
printf 'export SLURM_CONF=%s\n' "$dir/slurm.conf" >"$dir/env"
export SLURM_CONF=$dir/slurm.conf
trap 'code=$?; [ "$code" = 0 ] || "$here/test_cluster_down.sh" "$dir" >&2 || true' EXIT

# ---- the network: one bridge, and one namespace for each node

ip link add megafp8br0 type bridge
ip addr add "$net.1/24" dev megafp8br0
ip link set megafp8br0 up
{
    echo "127.0.0.1 localhost"
    echo "$net.1 $host"
    for i in $(seq 1 "$nodes"); do echo "$net.$((10 + i)) node$i"; done
} >"$dir/hosts"
for i in $(seq 1 "$nodes"); do
    ip netns add "megafp8-node$i"
    ip link add "mfp8v$i" type veth peer name eth0 netns "megafp8-node$i"
    ip link set "mfp8v$i" master megafp8br0 up
    ip -n "megafp8-node$i" addr add "$net.$((10 + i))/24" dev eth0
    ip -n "megafp8-node$i" link set eth0 up
    ip -n "megafp8-node$i" link set lo up
done

# ---- the settings

memory=$(awk -v n="$nodes" '/MemTotal/ {print int($2 / 1024 * 0.9 / n)}' /proc/meminfo)
gres_types=""; node_gres=""
if [ "$gpus" -gt 0 ]; then
    gres_types="GresTypes=gpu"; node_gres="Gres=gpu:$gpus"
    mkdir -p "$dir/dev"
    for g in $(seq 0 $((gpus - 1))); do [ -e "$dir/dev/nvidia$g" ] || mknod "$dir/dev/nvidia$g" c 1 3; done
    echo "NodeName=node[1-$nodes] Name=gpu File=$dir/dev/nvidia[0-$((gpus - 1))] Flags=nvidia_gpu_env" \
        >"$dir/gres.conf"
fi
: >"$dir/plugstack.conf"
# cred_expire also sets how long a requeued job waits: 10 s instead of 2 minutes.
cat >"$dir/slurm.conf" <<CONF
ClusterName=megafp8test
SlurmctldHost=$host($net.1)
SlurmctldPort=$((port - 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge-run/socket,cred_expire=10
StateSaveLocation=$dir/ctld
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
PlugStackConfig=$dir/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MinJobAge=3600
KillWait=30
MaxArraySize=1001
$gres_types
NodeName=node[1-$nodes] NodeHostname=node[1-$nodes] NodeAddr=$net.[11-$((10 + nodes))] Port=$((port + 1)) CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$memory $node_gres State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF

# ---- the daemons

if [ ! -s "$dir/munge/key" ]; then
    dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 status=none
    chmod 400 "$dir/munge/key"
fi
munged --socket="$dir/munge-run/socket" --key-file="$dir/munge/key" --pid-file="$dir/munge-run/pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" --force
echo "munged $(cat "$dir/munge-run/pid")" >>"$dir/pids"
slurmctld -D -i -f "$dir/slurm.conf" >"$dir/log/slurmctld.out" 2>&1 </dev/null &
echo "slurmctld $!" >>"$dir/pids"
mkdir -p "$dir"/image/{usr,etc}
for name in bin sbin lib lib64; do [ ! -L "/$name" ] || cp -P "/$name" "$dir/image/"; done
for i in $(seq 1 "$nodes"); do
    mkdir -p "$dir/spool/node$i"
    # `ip netns exec` would mount /sys again, and slurmd does not start without /sys/fs/cgroup.
    nsenter --net="/run/netns/megafp8-node$i" unshare --uts --mount sh -c \
        "mount --bind '$dir/hosts' /etc/hosts && mount --bind /usr '$dir/image/usr' && mount --bind /etc '$dir/image/etc' \
        && hostname node$i && exec slurmd -D -N node$i -f '$dir/slurm.conf'" \
        >"$dir/log/slurmd.node$i.out" 2>&1 </dev/null &
    echo "slurmd.node$i $!" >>"$dir/pids"
done
disown -a
for _ in $(seq 1 150); do
    idle=$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | wc -l || true)
    [ "$idle" != "$nodes" ] || { echo "test_cluster_up: $nodes nodes are idle; . $dir/env"; exit 0; }
    sleep 0.2
done
tail -n 5 "$dir"/log/*.out >&2
die "the nodes are not idle after 30 s"
