"""Apply the rules for document ends inside a sample: to positions, attention and the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE = -100  # a target with this value is not counted; the default of torch's cross entropy


# B samples of a microbatch, S tokens of a sample
@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """Holds NeMo's three switches; a token that ends a document belongs to that document."""

    eod_id: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def position_ids(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return each token's position since its document's or the sample's start, int64 [B, S].

        The result is None if `reset_position_ids` is off.
        """
        if not self.reset_position_ids:
            return None
        places_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape)
        starts_BS = np.where(self._begins(tokens_BS), places_BS, 0)
        positions_BS: NDArray[np.int64] = places_BS - np.maximum.accumulate(starts_BS, axis=1)
        return positions_BS

    def document_ids(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return a number for each token's document in its sample, from 0 up, int32 [B, S].

        The result is None if `reset_attention_mask` is off.
        """
        if not self.reset_attention_mask:
            return None
        return np.cumsum(self._begins(tokens_BS), axis=1, dtype=np.int32)

    def targets(
        self, tokens_BS: NDArray[np.int64], targets_BS: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the targets [B, S]; if `eod_mask_loss`, nothing is predicted after a document's
        end.
        """
        if not self.eod_mask_loss:
            return targets_BS
        masked_BS: NDArray[np.int64] = np.where(tokens_BS == self.eod_id, IGNORE, targets_BS)
        return masked_BS

    def _begins(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where a document begins inside the sample, which is after each end of a
        document.
        """
        begins_BS = np.zeros(tokens_BS.shape, np.bool_)
        begins_BS[:, 1:] = tokens_BS[:, :-1] == self.eod_id
        return begins_BS
