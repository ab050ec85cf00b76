"""What a block drafter is, in one spelling for DFlash, DSpark and their variants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and switches of the network that drafts a whole block in one forward.

    Args:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, hidden_act:
            of its decoder layers.
        vocab_size, draft_vocab_size: tokens of the target, and tokens that it can draft.
        target_hidden_size: width of the target's hidden states.
        aux_layers: which of the target's hidden states it reads: index e is the residual stream entering layer e, so
            0 is the embedding and the number of layers is the last layer's output before the final norm.
        block_size: rows of a block: the anchor, which is the text's last token, and masked ones behind it.
        first_slot: the first row whose output is a draft. 0: the anchor's own row guesses the token after it, so there
            are `block_size` drafts (DSpark). 1: every masked row guesses its own token, `block_size - 1` (DFlash).
        mask_token_id: row of the embedding that stands for a token to be guessed.
        windows: for each layer the tokens that it attends over, None for all.
        windows_from_anchor: every row of a block sees as many tokens before the anchor as the window is wide, and the
            block besides, as in the training of speculators; otherwise a window is counted from each row and includes
            it.
        causal: for each layer whether a row of the block sees only rows up to itself; otherwise it sees all of them.
        rope_parameters, max_position_embeddings: rotary embedding, in transformers' spelling.
        qk_norm: queries and keys are normed per head.
        attention_scale: what products of queries and keys are multiplied with; None is head_dim ** -0.5.
        attention_bias, output_bias, mlp_bias: whether the projections have biases.
        embedding_scale: what embeddings are multiplied with.
        logit_scale, logit_cap: logits are cap * tanh(scale * logits / cap); None caps nothing.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    first_slot: int
    mask_token_id: int
    windows: tuple[int | None, ...] = (None,)
    causal: tuple[bool, ...] = (False,)
    windows_from_anchor: bool = False
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    qk_norm: bool = True
    attention_scale: float | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def num_drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - self.first_slot
