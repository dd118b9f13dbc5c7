"""All ranks open a run's data, and it is the same data on all of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from megafp8.config.errors import SettingError
from megafp8.errors import RunError, UserError
from megafp8.parallel.agreement import on_all, raise_on_all
from megafp8.parallel.mesh import Mesh
from megafp8.runs.run_data import RunData, open_data, prefixes_of
from megafp8.specs import DataSpec

_HOSTS_SHOWN = 4
_CHARACTERS_SHOWN = 20  # some fingerprints begin with `sampled:`


def open_on_all(spec: DataSpec, mesh: Mesh, notify: Callable[[str], None]) -> RunData:
    """Open what `spec` names on every rank, and check that all ranks have the same data.

    Replicas on other hosts may read copies of their own, of which one may be older. All ranks call
    it together; arguments are those of `open_data`.

    Raises:
        UserError: What `open_data` raised on the lowest rank that failed, on every rank.
        SettingError: Ranks have different data; on every rank.
    """
    opened: list[RunData] = []

    def open_here() -> tuple[str, str]:
        here = socket.gethostname()
        try:
            opened.append(open_data(spec, notify))
        except UserError as error:
            if mesh.is_main:
                raise  # the main rank prints its own error, and others may have the same
            raise RunError(f"rank {mesh.world.rank} on {here}: {error}") from error
        return here, opened[0].fingerprint

    found = on_all(mesh, open_here)
    if len({fingerprint for _, fingerprint in found}) > 1:
        key, value = _named_by(spec)
        raise_on_all(
            SettingError(
                key,
                value,
                f"ranks have different data under this name: {describe_fingerprints(found)}",
                "Give every host the same files, or one copy that all hosts read",
            )
        )
    return opened[0]


def describe_fingerprints(found: Sequence[tuple[str, str]]) -> str:
    """Return which ranks have which data, for messages.

    Args:
        found: The host and the fingerprint of every rank, by rank.
    """
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, (host, fingerprint) in enumerate(found):
        ranks_of.setdefault(fingerprint, {}).setdefault(host, []).append(rank)
    parts = []
    for fingerprint, hosts in ranks_of.items():
        named = [f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items()]
        more = f" and {len(named) - _HOSTS_SHOWN} more hosts" if named[_HOSTS_SHOWN:] else ""
        listed = ", ".join(named[:_HOSTS_SHOWN])
        parts.append(f"fingerprint {fingerprint[:_CHARACTERS_SHOWN]} has {listed}{more}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of a host in words; a launcher gives a host consecutive ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_range = ranks[-1] - ranks[0] == len(ranks) - 1
    listed = f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
    return f"ranks {listed}"


def _named_by(spec: DataSpec) -> tuple[str, str]:
    """Return the key that names the data, and its value in words."""
    if spec.instructions is not None:
        return "model.data.train_ds.file_names", ", ".join(spec.instructions.train_files)
    return "model.data.data_prefix", ", ".join(prefixes_of(spec))
