"""What an EAGLE-3 head is, in one spelling for all published formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and switches of an EAGLE-3 head.

    Args:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, hidden_act:
            of its decoder layers.
        windows: for each decoder layer the tokens that it attends over, None for all. The first layer takes the
            embedding beside the hidden state, the others are ordinary.
        vocab_size, draft_vocab_size: tokens of the target, and tokens that the head can draft.
        target_hidden_size: width of the target's hidden states.
        aux_layers: which of the target's hidden states it reads: index e is the residual stream entering layer e, so
            0 is the embedding and the number of layers is the last layer's output before the final norm. Empty where
            the head reads the target's final, normed state instead (`use_aux_hidden_state: false`).
        rope_parameters, max_position_embeddings: rotary embedding, in transformers' spelling.
        norm_before_residual: the residual stream starts from the normed hidden state (speculators).
        norm_before_fc: one RMSNorm over the concatenated hidden states before `fc`.
        fc_norm: an RMSNorm for each hidden state before `fc` (EAGLE-3.1).
        norm_output: the state fed back while drafting is taken after the last norm (EAGLE-3.1).
        qk_norm: queries and keys are normed per head (a Qwen3 layer).
        attention_bias, output_bias, mlp_bias, fc_bias: whether queries, keys and values, the attention's output, the
            MLP and `fc` have biases.
        mask_token_id: the token whose embedding stands, beside the head's mask feature, for a drafted token that is not
            known yet, so that one forward guesses a whole draft (P-EAGLE). None where tokens are drafted one by one.
        num_parallel_tokens: the longest draft that it was trained to guess at once, None where no file says.
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
    windows: tuple[int | None, ...] = (None,)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    mask_token_id: int | None = None
    num_parallel_tokens: int | None = None


def default_aux_layers(num_target_layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late hidden state of the target: what every trainer takes by default."""
    return 2, num_target_layers // 2, num_target_layers - 3


def resolve_aux_layers(
    num_target_layers: int,
    entering: tuple[int, ...],
    of_eagle_config: tuple[int, ...],
) -> tuple[tuple[int, ...], bool]:
    """The hidden states that a head was trained on, from what its files say.

    Two conventions are in use and no file says which: ids of the layer that a state enters, and ids of the layer that
    it comes out of, one less. Only `eagle_config` lists mix them.

    Args:
        num_target_layers: layers of the target.
        entering: a list whose convention is known (top level of config.json: speculators, vLLM), () without one.
        of_eagle_config: the list inside `eagle_config` (SpecForge, ModelOpt, AngelSlim, and others), () without one.

    Returns:
        (entering ids, whether the convention had to be guessed).
    """
    ids, usual = of_eagle_config, default_aux_layers(num_target_layers)
    if entering:
        return entering, False
    if not ids:
        return usual, False
    if max(ids) >= num_target_layers or ids == usual:
        return ids, False
    if ids[0] == 1 or ids == tuple(i - 1 for i in usual):
        return tuple(i + 1 for i in ids), False
    if ids[0] == 2:
        return ids, False
    return tuple(i + 1 for i in ids), True
