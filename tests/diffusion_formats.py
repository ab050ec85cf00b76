"""Masked diffusion drafters with random weights, written in every published format.

The writers know the formats and nothing of the package: a native model of transformers gives the graph and the names of
the tensors, config.json is spelled as published, and a tokenizer's files stand beside it where a format needs them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, randomise
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MASK, BEGIN = 5, 4  # ids of the tiny vocabulary that stand for the mask, and for a token that only the drafter has
CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Format:
    """A published format.

    Args:
        native: the class that it was made from.
        fields: of its config.json, beside sizes.
        folder: ends the name of its repository.
        block_size: tokens of a block; None for full attention.
        shifts: whether the row before a slot predicts it.
        mask_in_tokenizer: whether the tokenizer's files name the mask.
        begin: whether it has a token of its own beside the mask.
        separates: whether the tokenizer names that token as a separator, which stands behind the text.
        renamed: (prefix, what it is called there).
    """

    native: str
    fields: dict
    folder: str = "drafter"
    block_size: int | None = None
    shifts: bool = False
    mask_in_tokenizer: bool = False
    begin: bool = False
    separates: bool = False
    renamed: tuple[tuple[str, str], ...] = ()


def _named(architecture: str, model_type: str, **fields) -> dict:
    return {"architectures": [architecture], "model_type": model_type, **fields}


FORMATS = {
    "SDAR": Format("qwen3", _named("SDARForCausalLM", "sdar", mask_token_id=MASK), "SDAR-tiny-Chat", 4),
    "SDAR, named": Format("qwen3", _named("SDARForCausalLM", "sdar", mask_token_id=MASK), "SDAR-tiny-Chat-b8", 8),
    "SDAR MoE": Format("qwen3_moe", _named("SDARMoeForCausalLM", "sdar_moe", mask_token_id=MASK), block_size=4),
    "Fast-dLLM v2": Format(
        "qwen2",
        _named("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", bd_size=6),
        block_size=6,
        shifts=True,
        mask_in_tokenizer=True,
    ),
    "Dream": Format("qwen2", _named("DreamModel", "Dream", mask_token_id=MASK), shifts=True, begin=True),
    "a2d Qwen2, mdlm": Format(
        "qwen2",
        _named("A2DQwen2LMHeadModel", "a2d-qwen2"),
        "Qwen2.5-tiny-diffusion-mdlm-v0.1",
        mask_in_tokenizer=True,
    ),
    "a2d Qwen3, mdlm": Format(
        "qwen3", _named("A2DQwen3LMHeadModel", "a2d-qwen3"), "Qwen3-tiny-diffusion-mdlm-v0.1", mask_in_tokenizer=True
    ),
    "a2d Qwen3, bd3lm": Format(
        "qwen3",
        _named("A2DQwen3LMHeadModel", "a2d-qwen3"),
        "Qwen3-tiny-diffusion-bd3lm-v0.1",
        block_size=32,
        mask_in_tokenizer=True,
    ),
    "open-dcoder": Format("qwen2", _named("Qwen2ForCausalLM", "qwen2"), shifts=True, mask_in_tokenizer=True),
    "open-dcoder, DEER": Format(
        "qwen2", _named("Qwen2ForCausalLM", "qwen2"), shifts=True, mask_in_tokenizer=True, begin=True, separates=True
    ),
    "Efficient-DLM": Format(
        "qwen3",
        _named("EfficientDLM", "qwen3", mask_token_id=MASK, block_size=8, dlm_paradigm="bidirectional"),
        block_size=8,
    ),
    "Efficient-DLM, Qwen2": Format(
        "qwen2",
        _named("EfficientDLM", "qwen2", mask_token_id=MASK, block_size=8),
        block_size=8,
        renamed=(("model.", "encoder."), ("lm_head.", "diffusion_head.")),
    ),
}


def random_model(format: str, seed: int = 0, vocab_size: int = VOCAB_SIZE, std: float = 0.15) -> PreTrainedModel:
    """A random model of a format's native class."""
    config, model = CLASSES[FORMATS[format].native]
    shape: dict = {**SHAPE, "vocab_size": vocab_size, "tie_word_embeddings": False}
    if config is not Qwen2Config:
        shape["head_dim"] = 16
    if config is Qwen3MoeConfig:
        shape.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model(config(**shape)).float().eval()
    randomise(made, seed, std)
    return made


def write_model(folder: Path, format: str, model: PreTrainedModel, **changed) -> Path:
    """Write a model as published.

    Args:
        folder: in which its repository is made.
        changed: fields of config.json that replace the format's; None leaves one out.
    """
    how, folder = FORMATS[format], folder / FORMATS[format].folder
    folder.mkdir(parents=True)
    model.save_pretrained(folder / "native")  # it undoes what the class does to names
    tensors = {}
    for file in (folder / "native").glob("*.safetensors"):
        tensors.update(load_file(file))
    for file in (folder / "native").iterdir():
        file.unlink()
    (folder / "native").rmdir()
    for old, new in how.renamed:
        tensors = {new + name[len(old) :] if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {name: getattr(model.config, name) for name in SHAPE if getattr(model.config, name, None) is not None}
    if how.native != "qwen2":
        sizes["head_dim"] = 16
    if how.native == "qwen3_moe":
        sizes.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False)
    config = {
        **sizes,
        "vocab_size": model.config.vocab_size,
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "use_sliding_window": False,
        "auto_map": {"AutoModel": "modeling_remote.Remote", "AutoConfig": "modeling_remote.RemoteConfig"},
        "torch_dtype": "bfloat16",
        **how.fields,
        **changed,
    }
    config = {name: value for name, value in config.items() if value is not None or name == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_remote.py").write_text("raise RuntimeError('remote code was run')\n")
    added = {MASK: "<|mask|>"} if how.mask_in_tokenizer else {}
    named = {"mask_token": "<|mask|>"} if how.mask_in_tokenizer else {}
    if how.begin:
        added[BEGIN] = "[SEP]" if how.separates else "<|beginoftext|>"
        named.update({"sep_token": "[SEP]"} if how.separates else {})
    if added:
        write_tokenizer(folder, added, **named)
    return folder


def write_random(folder: Path, seed: int, format: str) -> Path:
    """Write a random model as published."""
    return write_model(folder, format, random_model(format, seed))


def write_tokenizer(folder: Path, added: dict[int, str], **named: str) -> None:
    """The files of a tokenizer that name added tokens, and special ones among them."""
    special = {name: {"content": token, "special": True} for name, token in named.items()}
    decoder = {str(id): {"content": token, "special": True} for id, token in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "added_tokens_decoder": decoder}))
