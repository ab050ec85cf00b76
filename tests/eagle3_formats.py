"""EAGLE-3 heads with random weights, written in every published format.

One canonical head: tensors under the names of the network's parts and the facts that configs spell differently. The
writers know the formats and nothing of the package.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import VOCAB_SIZE

DRAFT_VOCAB_SIZE = 41
# Target layers of the tiny targets -> hidden states that the heads read: an embedding, one in the middle, the last.
AUX_LAYERS = {2: (0, 1, 2), 3: (0, 2, 3), 4: (1, 2, 4)}


@dataclass(frozen=True)
class Head:
    """A head and what its config has to say.

    Args:
        tensors: canonical names; `kept` below is not among them.
        kept: [Vd] target ids of the draft tokens, None where the head drafts all tokens.
        target_layers, aux_layers: of the target, and what the head reads (entering ids).
        rope: `rope_parameters` in the newest spelling.
        flags: norm_before_residual, norm_before_fc, fc_norm, norm_output, where they are on.
        mask_token_id: of a P-EAGLE head, whose tensors have `mask_hidden`; None of any other.
    """

    tensors: dict[str, torch.Tensor]
    kept: torch.Tensor | None
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layers: int
    aux_layers: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    flags: frozenset[str] = frozenset()
    mask_token_id: int | None = None

    def with_tensors(self, **changes: torch.Tensor | None) -> "Head":
        """A copy with tensors replaced, added, or (None) left out; `__` stands for a dot."""
        tensors = dict(self.tensors)
        for name, tensor in changes.items():
            name = name.replace("__", ".")
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        return replace(self, tensors=tensors)


def random_head(
    seed: int = 0,
    *,
    hidden_size: int = 64,
    target_hidden_size: int = 64,
    target_layers: int = 3,
    aux_layers: tuple[int, ...] | None = None,
    vocab_size: int = VOCAB_SIZE,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
    num_layers: int = 1,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    qk_norm: bool = False,
    biases: tuple[str, ...] = (),
    own_embedding: bool = False,
    flags: tuple[str, ...] = (),
    std: float = 0.12,
    **facts,
) -> Head:
    """A head whose every tensor is random, norms too, so that none could be swapped for another unseen."""
    generator = torch.Generator().manual_seed(seed)
    aux_layers = AUX_LAYERS[target_layers] if aux_layers is None else aux_layers
    intermediate_size, num_aux = 80, len(aux_layers)
    queries, keys = num_heads * head_dim, num_key_value_heads * head_dim
    tensors: dict[str, torch.Tensor] = {}

    def weight(name: str, *shape: int, scale: float = std) -> None:
        tensors[f"{name}.weight"] = torch.randn(*shape, generator=generator) * scale
        if name.rpartition(".")[2] in biases:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.3 * torch.randn(size, generator=generator)

    if num_aux:
        weight("fc", hidden_size, num_aux * target_hidden_size)
    if "norm_before_fc" in flags:
        norm("input_norm", num_aux * target_hidden_size)
    if "fc_norm" in flags:
        for i in range(num_aux):
            norm(f"fc_norm.{i}", target_hidden_size)
    for i in range(num_layers):
        inputs = 2 * hidden_size if i == 0 else hidden_size
        layer = f"layers.{i}"
        weight(f"{layer}.self_attn.q_proj", queries, inputs)
        weight(f"{layer}.self_attn.k_proj", keys, inputs)
        weight(f"{layer}.self_attn.v_proj", keys, inputs)
        weight(f"{layer}.self_attn.o_proj", hidden_size, queries)
        weight(f"{layer}.mlp.gate_proj", intermediate_size, hidden_size)
        weight(f"{layer}.mlp.up_proj", intermediate_size, hidden_size)
        weight(f"{layer}.mlp.down_proj", hidden_size, intermediate_size)
        norm(f"{layer}.input_layernorm", hidden_size)
        norm(f"{layer}.post_attention_layernorm", hidden_size)
        if i == 0 and num_aux:
            norm(f"{layer}.hidden_norm", hidden_size)
        if qk_norm:
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
    norm("norm", hidden_size)
    weight("lm_head", draft_vocab_size, hidden_size)
    if own_embedding:
        weight("embed_tokens", vocab_size, hidden_size, scale=0.5)
    if facts.get("mask_token_id") is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, max(num_aux, 1) * target_hidden_size, generator=generator)
    kept = None
    if draft_vocab_size < vocab_size:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    return Head(
        tensors=tensors,
        kept=kept,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        target_layers=target_layers,
        aux_layers=aux_layers,
        windows=facts.pop("windows", (None,) * num_layers),
        flags=frozenset(flags),
        **facts,
    )


def vocabulary_maps(head: Head, t2d: bool = True, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    if head.kept is None:
        return {}
    maps = {"d2t": (head.kept - torch.arange(len(head.kept))).to(dtype)}
    if t2d:
        maps["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill_(0, head.kept, True)
    return maps


def midlayer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def layer_fields(head: Head) -> dict:
    """Fields that all formats share, in transformers 4's spelling."""
    rope = {key: value for key, value in head.rope.items() if key != "rope_theta"}
    scaling = None if rope["rope_type"] == "default" else rope
    window = max((w for w in head.windows if w is not None), default=None)
    slides = {
        "sliding_window": window,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in head.windows],
    }
    return {
        "model_type": "llama",
        "hidden_size": head.hidden_size,
        "intermediate_size": 80,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "num_hidden_layers": 1,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": head.vocab_size,
        "max_position_embeddings": head.max_positions,
        "rope_theta": head.rope["rope_theta"],
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        **(slides if window else {}),
    }


def flag_fields(head: Head) -> dict:
    return dict.fromkeys(sorted(head.flags), True)


def midlayer_config(head: Head) -> dict:
    wide = {} if head.hidden_size == head.target_hidden_size else {"target_hidden_size": head.target_hidden_size}
    size = len(head.tensors.get("lm_head.weight", range(head.vocab_size)))
    return {**layer_fields(head), **flag_fields(head), **wide, "draft_vocab_size": size}


def safeailab(head: Head) -> tuple[dict, dict]:
    """EAGLE's own: nothing says eagle3 but draft_vocab_size, and nothing names the layers."""
    config = midlayer_config(head)
    config.update(architectures=["LlamaForCausalLM"], torch_dtype="float16", transformers_version="4.28.1")
    if head.head_dim * head.num_heads == head.hidden_size:
        del config["head_dim"]
    if config["rope_theta"] == 10000.0:
        del config["rope_theta"]
    # No field of this format can name the layers of a tiny target; vLLM's can.
    config["eagle_aux_hidden_state_layer_ids"] = list(head.aux_layers)
    return config, {**midlayer(head.tensors), **vocabulary_maps(head)}


def specforge(head: Head) -> tuple[dict, dict]:
    """Ids of the layers that states come out of, unless one of them is the embedding."""
    config = midlayer_config(head)
    config.update(architectures=["LlamaForCausalLMEagle3"], torch_dtype="bfloat16", attention_bias=False)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(head.aux_layers), "use_aux_hidden_state": True}
    return config, {**midlayer(head.tensors), **vocabulary_maps(head)}


def angelslim(head: Head) -> tuple[dict, dict]:
    config, tensors = specforge(head)
    config.update(architectures=["Eagle3LlamaForCausalLM"], target_model_type="qwen3", num_hidden_layers=48)
    return config, tensors


def speculators_old(head: Head) -> tuple[dict, dict]:
    layer = {**layer_fields(head), "mlp_bias": False, "pretraining_tp": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "draft_vocab_size": len(head.tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        "has_no_defaults_at_init": False,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        "transformer_layer_config": layer,
        **flag_fields(head),
    }
    if head.hidden_size != head.target_hidden_size:
        config["target_hidden_size"] = head.target_hidden_size
    return config, {**head.tensors, **vocabulary_maps(head)}


def speculators_new(head: Head) -> tuple[dict, dict]:
    config, tensors = speculators_old(head)
    layer = config["transformer_layer_config"]
    del layer["rope_theta"], layer["rope_scaling"]
    layer["rope_parameters"] = dict(head.rope)
    layer["model_type"] = "qwen3" if "layers.0.self_attn.q_norm.weight" in head.tensors else "llama"
    config.update(
        architectures=["Eagle3DraftModel"], speculators_version="0.9.0", norm_output="norm_output" in head.flags
    )
    config.update({flag: flag in head.flags for flag in ("norm_before_fc", "fc_norm", "embed_requires_grad")})
    return config, {**tensors, "verifier_norm.weight": torch.ones(head.target_hidden_size)}


def modelopt(head: Head) -> tuple[dict, dict]:
    config = midlayer_config(head)
    eagle = {name: config.pop(name) for name in ("norm_before_fc",) if name in config}
    eagle.update(
        eagle_aux_hidden_state_layer_ids=list(head.aux_layers) or None,
        use_aux_hidden_state=bool(head.aux_layers),
        use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True,
        use_mtp_layernorm=False,
        next_layer_regular=True,
        parallel_draft_step=1,
    )
    config.update(architectures=["LlamaForCausalLMEagle3"], mlp_bias=None, attention_bias=False, eagle_config=eagle)
    return config, {**head.tensors, **vocabulary_maps(head, t2d=False)}


FORMATS: dict[str, Callable[[Head], tuple[dict, dict]]] = {
    "SafeAILab": safeailab,
    "SpecForge": specforge,
    "AngelSlim": angelslim,
    "speculators, old": speculators_old,
    "speculators, new": speculators_new,
    "ModelOpt": modelopt,
}


def write(folder: Path, config: dict, tensors: dict, shards: int = 1, pickled: bool = False) -> Path:
    """A repository's folder: config.json and weights, in shards with an index or as `.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names = sorted(tensors)
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def write_head(folder: Path, head: Head, format: str = "speculators, old", **config) -> Path:
    """A head in one format, with fields of its config replaced."""
    fields, tensors = FORMATS[format](head)
    return write(folder, {**fields, **config}, tensors, pickled=format == "SafeAILab")
