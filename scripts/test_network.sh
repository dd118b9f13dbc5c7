#!/usr/bin/env bash
# Imitate hosts with addresses of their own on this machine, for tests: a bridge, and for each host a
# network namespace in which `eth0` has the host's address.
#
#   scripts/test_network.sh up BRIDGE NET PREFIX COUNT     hosts PREFIX1 … get NET.11 …, the bridge NET.1
#   scripts/test_network.sh down BRIDGE NET PREFIX COUNT
#   nsenter --net=/run/netns/PREFIX1 …                     run a command on a host
#
# The script needs root and Debian's package iproute2.
set -euo pipefail
[ $# = 5 ] || { echo "test_network: give up or down, BRIDGE, NET, PREFIX and COUNT" >&2; exit 2; }
way=$1; bridge=$2; net=$3; prefix=$4; count=$5
ends=v$(printf '%s' "$prefix" | cksum | cut -c1-6) # names of interfaces must be short

down() {
    for i in $(seq 1 "$count"); do
        ip link del "$ends-$i" 2>/dev/null || true
        ip netns del "$prefix$i" 2>/dev/null || true
    done
    ip link del "$bridge" 2>/dev/null || true
}

case $way in
up)
    ! ip link show "$bridge" >/dev/null 2>&1 || { echo "test_network: error: the bridge $bridge exists" >&2; exit 1; }
    trap 'code=$?; [ "$code" = 0 ] || down' EXIT
    ip link add "$bridge" type bridge
    ip addr add "$net.1/24" dev "$bridge"
    ip link set "$bridge" up
    for i in $(seq 1 "$count"); do
        ip netns add "$prefix$i"
        ip link add "$ends-$i" type veth peer name eth0 netns "$prefix$i"
        ip link set "$ends-$i" master "$bridge" up
        ip -n "$prefix$i" addr add "$net.$((10 + i))/24" dev eth0
        ip -n "$prefix$i" link set eth0 up
        ip -n "$prefix$i" link set lo up
    done
    ;;
down) down ;;
*) echo "test_network: give up or down, not $way" >&2; exit 2 ;;
esac
