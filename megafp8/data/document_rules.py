"""What the ends of documents inside a sample do: to positions, to attention, to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE = -100  # a target that is not counted; the default of torch's cross entropy


# B samples of a microbatch, S tokens of a sample
@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """NeMo's three switches. A token that ends a document belongs to the document that it ends."""

    eod_id: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def position_ids(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Tokens since the document's first, or since the sample's; None where not asked for."""
        if not self.reset_position_ids:
            return None
        places_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape)
        starts_BS = np.where(self._begins(tokens_BS), places_BS, 0)
        positions_BS: NDArray[np.int64] = places_BS - np.maximum.accumulate(starts_BS, axis=1)
        return positions_BS

    def document_ids(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """A number for each document of a sample, int32, from 0 up; None where not asked for."""
        if not self.reset_attention_mask:
            return None
        return np.cumsum(self._begins(tokens_BS), axis=1, dtype=np.int32)

    def targets(
        self, tokens_BS: NDArray[np.int64], targets_BS: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As given, or with nothing to predict after the end of a document."""
        if not self.eod_mask_loss:
            return targets_BS
        masked_BS: NDArray[np.int64] = np.where(tokens_BS == self.eod_id, IGNORE, targets_BS)
        return masked_BS

    def _begins(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where a document begins inside the sample: after each end of one."""
        begins_BS = np.zeros(tokens_BS.shape, np.bool_)
        begins_BS[:, 1:] = tokens_BS[:, :-1] == self.eod_id
        return begins_BS
