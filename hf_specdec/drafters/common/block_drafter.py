"""What DFlash and DSpark drafters share: the network, the output head, and what a target must be like."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..base import Drafter, TargetSignals
from ..request import DraftRequest
from .block_model import BlockModel
from .embedding import head_logits, num_rows, width
from .first_row import FirstRowCheck
from .vocabulary import over_target_vocabulary


class BlockDrafter(Drafter):
    """A drafter that guesses a whole block in one forward.

    Args:
        model: the network.
        head: its output head [Vd, H], None where it borrows the target's.
        target_ids: [Vd] target id of each token that it can draft, None where it drafts all of them.
        options: fields of SpecConfig.

    Attributes:
        first_row_check: goes on over the drafter's first tokens.
        first_row_remedy: what to do where it finds that another row guesses first.
    """

    first_row_remedy: str

    def __init__(self, model: BlockModel, head: nn.Linear | None, target_ids: torch.Tensor | None, **options: Any):
        super().__init__(**options)
        self.model, self.head = model, head
        self.target_ids: torch.Tensor | None
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.max_num_draft_tokens = model.config.num_drafts
        self.default_num_draft_tokens = model.config.num_drafts
        self._num_target_layers = 0  # until `bind`
        first = model.config.first_slot
        self.first_row_check = FirstRowCheck(first, self.first_row_remedy.format(other=1 - first))

    @property
    def signals(self) -> TargetSignals:
        layers = self.model.config.aux_layers
        return TargetSignals(hidden_states=layers, pre_norm_last=self._num_target_layers in layers)

    def check_target(self, target: PreTrainedModel) -> None:
        config, theirs = self.model.config, target.config.get_text_config()
        name = f"this {self.method} drafter"
        for what, ours, wanted in (
            ("hidden size", config.target_hidden_size, theirs.hidden_size),
            ("vocabulary", config.vocab_size, theirs.vocab_size),
        ):
            if ours != wanted:
                raise ValueError(f"{name} was made for a {what} of {ours} and the target's is {wanted}.")
        if max(config.aux_layers) > theirs.num_hidden_layers:
            raise ValueError(
                f"{name} reads hidden state {max(config.aux_layers)} and the target has {theirs.num_hidden_layers} "
                "layers; it was trained for another target."
            )
        for part, own, module, size in (
            ("embedding", getattr(self.model, "embed_tokens", None), target.get_input_embeddings(), "embedding_dim"),
            ("output head", self.head, target.get_output_embeddings(), "in_features"),
        ):
            found = None if module is None else width(module, size)
            if own is None and found != config.hidden_size:
                raise ValueError(
                    f"{name} has no {part}, and the target's is {found} wide where {config.hidden_size} is needed."
                )
        embedding: Any = getattr(self.model, "embed_tokens", target.get_input_embeddings())
        if config.mask_token_id >= num_rows(embedding):
            raise ValueError(
                f"{name} masks with token {config.mask_token_id} and the embedding has {num_rows(embedding)} "
                "rows; resize the target's embedding as the drafter's card says, or take another drafter."
            )
        self._num_target_layers = theirs.num_hidden_layers

    def logits(self, states: torch.Tensor, request: DraftRequest) -> torch.Tensor:
        """[..., Vd] fp32 logits of states [..., H], scaled and capped as the drafter's config says."""
        head: Any = self.head or request.head
        return self.model.cap(head_logits(head, states).float())

    def scatter(self, logits: torch.Tensor, request: DraftRequest) -> torch.Tensor:
        """[..., V] the same over the target's vocabulary, on the device of the call's rows."""
        return over_target_vocabulary(logits, self.target_ids, request.vocab_size, request.rows.ids.device)
