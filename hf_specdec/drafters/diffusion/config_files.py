"""What the files of a masked diffusion model say: which family it is, how it reads a canvas, and its native config."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ..auto import Repository
from ..common.config_files import needed, rope_of
from ..common.fields import Fields
from ..common.tokenizers import added_tokens, is_masked_qwen2, special_token_id
from .families import FAMILIES, NATIVE, OPEN_DCODER, Family

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LONGEST_BLOCK = 1024
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")


@dataclass(frozen=True)
class CanvasConfig:
    """How a drafter reads and fills a canvas.

    Args:
        block_size: tokens of a block; with full attention, masks behind the text.
        full_attention: whether every token sees every other; otherwise its own block and those before it.
        shift: how many rows before a slot the one is that predicts it, 0 or 1.
        mask_token_id: what stands in a slot that has no token yet; None for random tokens.
        barred: ids that are never drafted.
        separator: a token between the text and the masks.
    """

    block_size: int
    full_attention: bool
    shift: int
    mask_token_id: int | None
    barred: tuple[int, ...]
    separator: int | None = None


def family_of(repository: Repository) -> tuple[Family, str] | None:
    """(family, what tells) of a repository; None for everything else."""
    config = repository.config
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, list) else []
    for family in FAMILIES:
        for name in architectures:
            if name in family.architectures:
                return family, f"config.json names {name}"
        if config.get("model_type") in family.model_types:
            return family, f"config.json has model_type {config['model_type']!r}"
    if is_masked_qwen2(repository):
        return OPEN_DCODER, "config.json names Qwen2ForCausalLM, and the tokenizer has a mask token"
    return None


def read_canvas_config(
    repository: Repository,
    family: Family,
    vocab_size: int,
    attention: str | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    separator_token_id: int | None = None,
) -> CanvasConfig:
    """How the checkpoint reads a canvas; the options win over its files.

    Raises:
        ValueError: the files do not say what has to be known, or an option is not what it can be.
    """
    path, fields = repository.path, Fields(repository.path, repository.config)
    if family.name == "Dream" and "block_size" in fields:
        raise ValueError(f"{path} is a Dream with blocks (block_size in config.json), which is not served yet.")
    mask = _mask_token_id(repository, family, fields, vocab_size, mask_token_id)
    ids = added_tokens(path)
    own = [ids.get(token, default) for token, default in family.own_tokens]
    full_attention = _attention(repository, family, attention) == "full"
    separator = separator_token_id
    if separator is None and family.separates:
        separator = special_token_id(path, "sep_token")
    if separator is not None:
        _check_id(separator, "`separator_token_id`", repository, vocab_size)
        if not full_attention:
            raise ValueError(f"`separator_token_id` is {separator}; a drafter in blocks has none, leave it at None.")
        own.append(separator)
    return CanvasConfig(
        block_size=_block_size(repository, family, fields, block_size),
        full_attention=full_attention,
        separator=separator,
        shift=int(family.shifts),
        mask_token_id=mask,
        barred=tuple(sorted({mask, *own})),
    )


def native_config(repository: Repository, family: Family, tensors: dict[str, torch.Tensor]) -> PreTrainedConfig:
    """The config of the native class. Nothing of the file is taken that its graph does not know.

    Raises:
        ValueError: a size is missing, or the graph is another one (sliding windows).
    """
    path, fields = repository.path, Fields(repository.path, repository.config)
    missing = [name for name in _SIZES if name not in fields]
    if missing:
        raise ValueError(f"config.json in {path} lacks {', '.join(missing)}.")
    if fields.flag("use_sliding_window", False) or "sliding_attention" in fields.texts("layer_types"):
        raise ValueError(f"{path} has sliding windows, which no published diffusion model has; it is not served.")
    sizes = {name: fields.integer(name, 1) for name in _SIZES}
    native = family.native or _native_by(tensors)
    if family.shares:
        vocab_size = fields.integer("vocab_size", 1)
    else:
        vocab_size = needed(repository, tensors, "model.embed_tokens.weight").shape[0]
    if native != "qwen2":
        sizes["head_dim"] = fields.integer("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        sizes["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
    if native == "qwen3_moe":
        sizes.update({name: fields.integer(name, 1) for name in _EXPERTS if name in fields})
        sizes["norm_topk_prob"] = fields.flag("norm_topk_prob", False)
    return NATIVE[native][0](
        **sizes,
        vocab_size=vocab_size,
        hidden_act=fields.text("hidden_act", "silu"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
        rope_parameters=rope_of(fields),
        tie_word_embeddings="lm_head.weight" not in tensors,
        use_sliding_window=False,
        pad_token_id=None,
    )


def _native_by(tensors: dict[str, torch.Tensor]) -> str:
    """The class whose layers have such tensors."""
    if "model.layers.0.self_attn.q_norm.weight" in tensors:
        return "qwen3"
    return "qwen2" if "model.layers.0.self_attn.q_proj.bias" in tensors else "llama"


def checked_block_size(block_size: int, longest: int) -> int:
    """The option `block_size`, refused where it is none."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or not 1 <= block_size <= longest:
        raise ValueError(f"`block_size` is {block_size!r}; give an integer from 1 to {longest}.")
    return block_size


def _attention(repository: Repository, family: Family, chosen: str | None) -> str:
    """ "full" or "block_causal"."""
    if chosen not in (None, "full", "block_causal"):
        raise ValueError(f"`attention` is {chosen!r}; give 'full', 'block_causal', or None for what the files say.")
    if chosen is not None or family.attention != "named":
        return chosen or family.attention
    name = _name(repository)
    if ("mdlm" in name) == ("bd3lm" in name):
        raise ValueError(
            f"{repository.path} is an a2d model, and neither its files nor its name say whether it was trained with "
            "full attention (mdlm) or in blocks (bd3lm); give attention='full' or attention='block_causal'."
        )
    return "full" if "mdlm" in name else "block_causal"


def _block_size(repository: Repository, family: Family, fields: Fields, chosen: int | None) -> int:
    if chosen is not None:
        return checked_block_size(chosen, _LONGEST_BLOCK)
    named = re.search(r"-b(\d+)(?=/|$)", _name(repository)) if family.named_block else None
    return fields.integer(family.block_field, int(named.group(1)) if named else family.block_size)


def _mask_token_id(repository: Repository, family: Family, fields: Fields, vocab_size: int, chosen: int | None) -> int:
    """From the options, config.json, the tokenizer, or what the family published; of `vocab_size` rows."""
    found, source = chosen, "`mask_token_id`"
    if found is None and "mask_token_id" in fields:
        found, source = fields.integer("mask_token_id", 0, least=0), "mask_token_id of config.json"
    if found is None:
        found, source = special_token_id(repository.path, "mask_token"), "the mask token of the tokenizer"
    if found is None:
        found, source = family.mask_token_id, f"the mask token that {family.name} models were published with"
    if found is None:
        raise ValueError(f"{repository.path} does not say which token is its mask; give mask_token_id=...")
    _check_id(found, source, repository, vocab_size)
    return found


def _check_id(id: int, source: str, repository: Repository, vocab_size: int) -> None:
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < vocab_size:
        raise ValueError(
            f"{source} is {id!r}, and {repository.path} has embeddings for ids from 0 to {vocab_size - 1}; give "
            "another (mask_token_id=..., separator_token_id=...)."
        )


def _name(repository: Repository) -> str:
    """The end of the path that names a repository; the Hub's cache puts its own folders behind the name."""
    path = repository.path
    cached = next((part for part in reversed(path.parts) if part.startswith("models--")), path.name)
    return cached.lower()
