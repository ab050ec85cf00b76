"""Tiny targets with random MTP layers under the names that each family publishes, and checkpoints of them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from mtp_deepseek import (
    bailing_hybrid,
    deepseek_v3,
    deepseek_v32,
    dots3_note,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    glm_ocr,
    hy_v3,
    hy_v4,
    hy_v4_vl,
    llama,
)
from mtp_others import (
    ernie4_5_moe,
    inkling,
    inkling_without_norm,
    longcat_flash,
    mimo,
    mimo_v2_flash,
    nemotron_h,
    step3p7,
)
from mtp_published import Published
from mtp_qwen import exaone4_5, exaone_moe, mellum, qwen3_5, qwen3_5_moe, qwen3_5_vl, qwen3_next
from mtp_streams import deepseek_v4, qwen4_exp, qwen4_exp_vl
from safetensors.torch import load_file, save_file
from tiny import randomise
from transformers import PreTrainedModel

FAMILIES: dict[str, Callable[[], Published]] = {
    function.__name__: function
    for function in (
        deepseek_v3,
        deepseek_v32,
        glm4_moe,
        glm4_moe_lite,
        glm_moe_dsa,
        glm_ocr,
        hy_v3,
        hy_v4,
        hy_v4_vl,
        bailing_hybrid,
        dots3_note,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        qwen3_5_vl,
        exaone_moe,
        exaone4_5,
        mellum,
        ernie4_5_moe,
        nemotron_h,
        step3p7,
        inkling,
        inkling_without_norm,
        mimo_v2_flash,
        longcat_flash,
        deepseek_v4,
        qwen4_exp,
        qwen4_exp_vl,
    )
}
# Of targets that are published without MTP layers, or whose class is not in transformers.
STANDALONE: dict[str, Callable[[], Published]] = {function.__name__: function for function in (llama, mimo)}


def random_target(published: Published, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = published.auto.from_config(published.config).float().eval()
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # a final norm without weights would make the state before it as good as the one after it
        for parameter in model.get_decoder().parameters(recurse=True):
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def write_target(folder: Path, published: Published, seed: int = 0) -> Path:
    """A checkpoint of the target, its MTP layers in a shard of their own."""
    random_target(published, seed).save_pretrained(folder)
    own = (folder / "model.safetensors").rename(folder / "own.safetensors")
    names = dict.fromkeys(load_file(own), own.name)
    save_file(published.tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    names |= dict.fromkeys(published.tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def write_standalone(folder: Path, published: Published, **fields: object) -> Path:
    """A repository that holds the MTP layers only."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "mtp", **fields}))
    return folder
