"""Masked diffusion checkpoints, loaded into the native class of the model that they were made from.

The repositories bring code of their own; none of it is read. DiffusionGemma is a class of transformers itself. LLaDA is
recognised and refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedModel

from ..auto import DrafterFormat, Repository
from ..common.checkpoints import read_tensors
from ..common.config_files import refuse_quantised
from ..common.fields import Fields
from ..common.tokenizers import differing_tokens
from .config_files import CanvasConfig, checked_block_size, family_of, native_config, read_canvas_config
from .drafter import DiffusionDrafter
from .families import NATIVE, REFUSED

_IGNORED = ("model.rotary_emb.",)
_SHARED = {"model.embed_tokens.weight", "lm_head.weight"}  # with the target, where a family says so
_GEMMA = "diffusion_gemma"
_GEMMA_CANVAS = 32  # tokens; it was trained on 256, of which the later ones are rarely worth their passes


def detect(repository: Repository) -> DrafterFormat | None:
    """By the model type or the class in config.json."""
    if repository.tensors is None and not any(repository.path.glob("*.bin")):
        return None
    kind = str(repository.config.get("model_type"))
    if kind in REFUSED:
        return DrafterFormat("diffusion", kind, f"config.json has model_type {kind!r}")
    if kind == _GEMMA:
        return DrafterFormat("diffusion", "DiffusionGemma", f"config.json has model_type {kind!r}")
    found = family_of(repository)
    return None if found is None else DrafterFormat("diffusion", found[0].name, found[1])


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    separator_token_id: int | None = None,
    **overrides: Any,
) -> DiffusionDrafter:
    """Read a drafter.

    Args:
        repository: the folder.
        target: the model that it will draft for.
        dtype, device: of the weights.
        attention: "full" or "block_causal", where the files do not say.
        block_size: tokens of a block, or masks behind the text, where the files are wrong or do not say.
        mask_token_id: its mask token, likewise.
        separator_token_id: a token between text and masks, as DEER trains, where the tokenizer names none.
        overrides: `reveal_order`, `final_resample`, and fields of SpecConfig.

    Raises:
        ValueError: it is none that is served, its files are incomplete, or it has another tokenizer than the target.
    """
    DiffusionDrafter.check_options(**overrides)
    path, kind = repository.path, str(repository.config.get("model_type"))
    if kind in REFUSED:
        raise ValueError(f"{path} cannot draft for {type(target).__name__}: {REFUSED[kind]}.")
    if kind == _GEMMA:
        for name, value in (
            ("attention", attention),
            ("mask_token_id", mask_token_id),
            ("separator_token_id", separator_token_id),
        ):
            if value is not None:
                raise ValueError(f"`{name}` is {value!r}; DiffusionGemma has no use for it, leave it at None.")
        return _load_gemma(repository, target, dtype, device, block_size, overrides)
    found = family_of(repository)
    assert found is not None  # detected
    family = found[0]
    tensors = read_tensors(repository, family.renamed, _IGNORED)
    refuse_quantised(repository, tensors, Fields(path, repository.config))
    config = native_config(repository, family, tensors)
    canvas = read_canvas_config(
        repository, family, config.vocab_size, attention, block_size, mask_token_id, separator_token_id
    )
    _check_tokenizer(repository, target, canvas.barred)
    if family.shares:
        if surplus := _SHARED & tensors.keys():
            raise ValueError(f"{path} holds {', '.join(sorted(surplus))}; a {family.name} drafter shares the target's.")
        # A stand-in that is dropped again, for transformers warns of a model without.
        tensors["model.embed_tokens.weight"] = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    native = next(model for kind, model in NATIVE.values() if type(config) is kind)
    model, info = native.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",  # takes a mask of any form
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
    )
    if family.shares:
        model.set_input_embeddings(None)
        model.set_output_embeddings(None)
    _check_complete(repository, family.name, info)
    return DiffusionDrafter(model.to(device).eval(), canvas, **overrides)


def _load_gemma(
    repository: Repository,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int | None,
    overrides: dict[str, Any],
) -> DiffusionDrafter:
    _check_tokenizer(repository, target, ())
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        repository.path,
        dtype=dtype,
        local_files_only=True,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _check_complete(repository, "DiffusionGemma", info)
    longest = int(model.config.canvas_length)
    canvas = CanvasConfig(
        block_size=min(_GEMMA_CANVAS, longest) if block_size is None else checked_block_size(block_size, longest),
        full_attention=True,
        shift=0,
        mask_token_id=None,
        barred=(),
    )
    return DiffusionDrafter(model.to(device).eval(), canvas, **overrides)


def _check_tokenizer(repository: Repository, target: PreTrainedModel, own_ids: Collection[int]) -> None:
    differing = differing_tokens(repository.path, target, own_ids)
    if differing:
        raise ValueError(
            f"{repository.path} has another tokenizer than the target: {len(differing)} tokens differ (for example "
            f"{differing[0]!r}); a diffusion drafter needs the target's."
        )


def _check_complete(repository: Repository, name: str, info: dict[str, Any]) -> None:
    """Refuse tensors that are missing, surplus or of another shape."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            names = ", ".join(sorted(key if isinstance(key, str) else key[0] for key in info[problem])[:5])
            raise ValueError(
                f"{repository.path} is not a complete {name} model: {problem.replace('_keys', '')} tensors {names}. "
                f"Found {repository.describe()}."
            )
