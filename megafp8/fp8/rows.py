"""Compare between ranks the lists of what they reduce by place, such as the rows of scale tables.

A row that is another tensor's on another rank would mix the amaxes of the two without an error, so
ranks agree on the rows by name before they reduce any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist

from megafp8.fp8.scaling import ScalingState
from megafp8.ops.exchange import gather_bytes

_MOST_RANKS = 8  # that a message names


def why_rows_differ(scaling: ScalingState, group: dist.ProcessGroup) -> str | None:
    """Return how the scale tables of a group's ranks differ, or None where these may reduce them.

    They may if all ranks have the same names in the same order, and at least one rank casts each
    tensor. All ranks of the group call the function together.
    """
    tables = {"forward scales": scaling.forward, "backward scales": scaling.backward}
    elsewhere = [name for table in tables.values() for name in table.elsewhere]
    return why_lists_differ({of: table.names for of, table in tables.items()}, group, elsewhere)


def why_lists_differ(
    lists: Mapping[str, Sequence[str]], group: dist.ProcessGroup, elsewhere: Sequence[str] = ()
) -> str | None:
    """Return how lists of names differ between a group's ranks, or None where all are the same.

    The names `elsewhere` have a row here that another rank fills; one that no rank fills is a
    difference too. All ranks of the group call the function together.
    """
    digest = hashlib.sha256(json.dumps(lists).encode()).digest()
    told = set(gather_bytes(digest + bytes([bool(elsewhere)]), group))
    if len(told) == 1 and not elsewhere:
        return None
    content = json.dumps([lists, list(elsewhere)]).encode()
    of_ranks = [json.loads(part) for part in gather_bytes(content, group)]
    ranks = dist.get_process_group_ranks(group)
    for of in lists:
        for number, row in enumerate(zip_longest(*(names[of] for names, _ in of_ranks))):
            place = f"row {number} of the {of} is"
            if len(once := dict.fromkeys(row)) > 1:
                found = (f"{name or 'missing'} on {_ranks(row, name, ranks)}" for name in once)
                return f"{place} {' and '.join(found)}"
            if all(row[0] in absent for _, absent in of_ranks):
                return f"{place} {row[0]}, which no rank casts"
    return None


def _ranks(row: tuple[str | None, ...], name: str | None, ranks: list[int]) -> str:
    """Return the ranks that have this name in the row, in words."""
    having = [str(rank) for rank, other in zip(ranks, row, strict=True) if other == name]
    if len(having) > _MOST_RANKS:
        having = [*having[:_MOST_RANKS], f"{len(having) - _MOST_RANKS} more"]
    return f"rank{'s' * (len(having) > 1)} {', '.join(having)}"
