"""The families of masked diffusion language models whose published checkpoints can draft, a row each.

All are autoregressive models of a family that transformers has, trained on to fill in masks: the same graph under
another attention mask. So weights load into the native class, and what differs is in these rows. Facts are the model
cards' and repositories' own; sizes come from each checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NATIVE: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


@dataclass(frozen=True)
class Family:
    """What the checkpoints of a family have in common.

    Args:
        name: for messages.
        model_types, architectures: of config.json; one of either tells.
        native: the class of transformers that it loads into, by NATIVE's names; None where the tensors say which.
        attention: "block_causal": a token sees its own block and those before it, so the keys of complete blocks are
            final. "full": every token sees every other, so nothing can be kept. "named": the family has both, and only
            the repository's name says which: "bd3lm" blocks, "mdlm" full.
        shifts: the row before a slot predicts it, as in the model that it was made from; otherwise its own row.
        block_field, block_size: where config.json says how long blocks are, and the length where it does not. With
            full attention it is the number of masks that are put behind the text.
        named_block: a name ending like "-b16" says so too.
        mask_token_id: where neither config.json nor the tokenizer's files say it.
        own_tokens: other tokens that only the drafter has, with their published ids; they are never drafted.
        separates: whether some of its checkpoints put a token between text and masks, the tokenizer's separator.
        renamed: (prefix, what it becomes) of tensors.
        shares: whether embedding and output head are the target's, and not in its files.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    native: str | None
    attention: str
    shifts: bool
    block_field: str = "block_size"
    block_size: int = 32
    named_block: bool = False
    mask_token_id: int | None = None
    own_tokens: tuple[tuple[str, int], ...] = ()
    separates: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    shares: bool = False


FAMILIES = (
    Family(  # arXiv:2510.06303; JetLM/SDAR-*, the target's family is Qwen3
        name="SDAR",
        model_types=("sdar",),
        architectures=("SDARForCausalLM",),
        native="qwen3",
        attention="block_causal",
        shifts=False,
        block_size=4,
        named_block=True,
        mask_token_id=151669,
    ),
    Family(  # JetLM/SDAR-30B-A3B-*
        name="SDAR MoE",
        model_types=("sdar_moe",),
        architectures=("SDARMoeForCausalLM",),
        native="qwen3_moe",
        attention="block_causal",
        shifts=False,
        block_size=4,
        named_block=True,
        mask_token_id=151669,
    ),
    Family(  # Efficient-Large-Model/Fast_dLLM_v2_*, Qwen2.5
        name="Fast-dLLM v2",
        model_types=("Fast_dLLM_Qwen",),
        architectures=("Fast_dLLM_QwenForCausalLM",),
        native="qwen2",
        attention="block_causal",
        shifts=True,
        block_field="bd_size",
        mask_token_id=151665,
    ),
    Family(  # Dream-org/Dream-*, Dream-Coder, apple/DiffuCoder-*, Qwen2.5
        name="Dream",
        model_types=("Dream", "dream"),
        architectures=("DreamModel",),
        native="qwen2",
        attention="full",
        shifts=True,
        mask_token_id=151666,
        own_tokens=(("<|beginoftext|>", 151665),),
    ),
    Family(  # dllm-hub/Qwen2.5-*-diffusion-{mdlm,bd3lm}-*
        name="a2d Qwen2",
        model_types=("a2d-qwen2",),
        architectures=("A2DQwen2LMHeadModel",),
        native="qwen2",
        attention="named",
        shifts=False,
        mask_token_id=151665,
    ),
    Family(  # dllm-hub/Qwen3-*-diffusion-{mdlm,bd3lm}-*
        name="a2d Qwen3",
        model_types=("a2d-qwen3",),
        architectures=("A2DQwen3LMHeadModel",),
        native="qwen3",
        attention="named",
        shifts=False,
        mask_token_id=151669,
    ),
    Family(  # nvidia/Efficient-DLM-*, Qwen3 and Qwen2.5; arXiv:2512.14067
        name="Efficient-DLM",
        model_types=(),  # it calls itself by the name of the model that it was made from
        architectures=("EfficientDLM",),
        native=None,
        attention="block_causal",
        shifts=False,
        renamed=(("encoder.", "model."), ("diffusion_head.", "lm_head.")),  # as its makers' later models name them
    ),
    Family(  # this package's own: python -m hf_specdec.training diffusion
        name="block diffusion",
        model_types=("block_diffusion",),
        architectures=("BlockDiffusionDraftModel",),
        native=None,
        attention="block_causal",
        shifts=False,
        shares=True,
    ),
)

# fredzzp/open-dcoder-0.5B, Qwen2.5-Coder; its config.json is that of a plain Qwen2. DEER drafters (arXiv:2512.15176)
# are made from it, and put a separator behind the text.
OPEN_DCODER = Family(
    name="open-dcoder",
    model_types=(),
    architectures=(),
    native="qwen2",
    attention="full",
    shifts=True,
    mask_token_id=151665,
    separates=True,
)

REFUSED = {  # model type -> why it cannot draft
    "llada": "LLaDA has a tokenizer of its own, which no autoregressive model shares",
    "llada2_moe": "LLaDA 2 has a tokenizer of its own, which no autoregressive target here shares",
}
