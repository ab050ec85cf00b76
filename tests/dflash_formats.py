"""DFlash drafters with random weights, written in every published format.

One canonical drafter: tensors under the names of the network's parts and the facts that configs spell differently. The
writers know the formats and nothing of the package.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from eagle3_formats import write
from tiny import VOCAB_SIZE

MASK = 4
# Target layers of the tiny targets -> hidden states that the drafters read: the last one before the final norm too.
AUX_LAYERS = {2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4), 5: (1, 3, 5)}


@dataclass(frozen=True)
class Net:
    """A drafter and what its config has to say.

    Args:
        tensors: canonical names; `kept` below is not among them.
        kept: [Vd] target ids of the draft tokens, None where the drafter drafts all tokens.
        target_layers, aux_layers: of the target, and what the drafter reads (entering ids).
        first_slot: first row of a block that guesses.
        windows, causal: of each layer.
        from_anchor: windows are speculators' own.
        rope: `rope_parameters` in the newest spelling.
        embedding_scale, logit_scale, logit_cap: of the config.
        num_candidates: of DFlash 2, 0 for DFlash.
    """

    tensors: dict[str, torch.Tensor]
    kept: torch.Tensor | None
    vocab_size: int
    target_layers: int
    aux_layers: tuple[int, ...]
    block_size: int = 5
    first_slot: int = 1
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    from_anchor: bool = False
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    num_candidates: int = 0

    def with_tensors(self, **changes: torch.Tensor | None) -> "Net":
        """A copy with tensors replaced, added, or (None) left out; `__` stands for a dot."""
        tensors = dict(self.tensors)
        for name, tensor in changes.items():
            name = name.replace("__", ".")
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        return replace(self, tensors=tensors)


def random_net(
    seed: int = 0,
    *,
    target_layers: int = 3,
    vocab_size: int = VOCAB_SIZE,
    draft_vocab_size: int | None = None,
    num_layers: int = 2,
    num_taps: int = 2,
    group_size: int = 16,
    rank: int = 8,
    num_candidates: int = 0,
    std: float = 0.08,
    **facts,
) -> Net:
    """A drafter whose every tensor is random, norms too, so that none could be swapped for another unseen."""
    generator = torch.Generator().manual_seed(seed)
    aux_layers = facts.pop("aux_layers", AUX_LAYERS[target_layers])
    size, inner, queries, keys, head_dim = 64, 80, 64, 32, 16
    tensors: dict[str, torch.Tensor] = {}

    def weight(name: str, *shape: int, scale: float = std) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * scale

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.3 * torch.randn(width, generator=generator)

    weight("fc.weight", size, len(aux_layers) * size)
    norm("hidden_norm", size)
    norm("norm", size)
    for i in range(num_layers):
        layer = f"layers.{i}"
        for part, rows, columns in (("q", queries, size), ("k", keys, size), ("v", keys, size), ("o", size, queries)):
            weight(f"{layer}.self_attn.{part}_proj.weight", rows, columns)
        for part, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            weight(f"{layer}.mlp.{part}_proj.weight", rows, columns)
        norm(f"{layer}.input_layernorm", size)
        norm(f"{layer}.post_attention_layernorm", size)
        norm(f"{layer}.self_attn.q_norm", head_dim)
        norm(f"{layer}.self_attn.k_norm", head_dim)
        for conv in ("attention_conv", "mlp_conv") if num_candidates else ():
            weight(f"{layer}.{conv}.base_kernel", 2, num_taps, size, scale=0.5)
            weight(f"{layer}.{conv}.kernel_projection.weight", 2 * num_taps * size // group_size, size, scale=0.05)
    if num_candidates:
        weight("candidate_selector.hidden_projection.weight", rank, size)
        weight("candidate_selector.predecessor_codebook", vocab_size, rank, scale=0.5)
        weight("candidate_selector.successor_codebook", vocab_size, rank, scale=0.5)
    kept = None
    if draft_vocab_size is not None:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        weight("lm_head.weight", draft_vocab_size, size)
    facts = {"windows": (None,) * num_layers, "causal": (False,) * num_layers, **facts}
    return Net(tensors, kept, vocab_size, target_layers, aux_layers, num_candidates=num_candidates, **facts)


def layer_fields(net: Net) -> dict:
    """Fields of a Qwen3 config, in transformers 4's spelling."""
    rope = {key: value for key, value in net.rope.items() if key != "rope_theta"}
    window = max((w for w in net.windows if w is not None), default=None)
    return {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": len(net.windows),
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "vocab_size": net.vocab_size,
        "max_position_embeddings": net.max_positions,
        "rope_theta": net.rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": len(net.windows),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in net.windows],
    }


def told_causality(net: Net) -> dict:
    """`is_causal` where the rule that holds without it says something else."""
    by_rule = tuple(window is not None for window in net.windows)
    return {} if net.causal == by_rule else {"is_causal": net.causal[0]}


def leaving(net: Net) -> list[int]:
    return [i - 1 for i in net.aux_layers]


def extras(net: Net) -> dict:
    """What `dflash_config` holds beside ids."""
    fields = {}
    if net.num_candidates:
        fields |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": net.num_candidates,
        }
    for name, value, default in (
        ("input_embedding_scale", net.embedding_scale, 1.0),
        ("output_multiplier", net.logit_scale, 1.0),
        ("final_logit_softcapping", net.logit_cap, None),
    ):
        fields |= {} if value == default else {name: value}
    return fields


def zlab(net: Net) -> tuple[dict, dict]:
    """The first releases: remote code, block_size at the top."""
    name = "DFlash2DraftModel" if net.num_candidates else "DFlashDraftModel"
    config = {
        **layer_fields(net),
        **told_causality(net),
        "architectures": [name],
        "auto_map": {"AutoModel": f"dflash.{name}"},
        "block_size": net.block_size,
        "num_target_layers": net.target_layers,
        "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": leaving(net), **extras(net)},
    }
    return config, dict(net.tensors)


def zlab_new(net: Net) -> tuple[dict, dict]:
    """Without remote code, block_size inside (a copy at the top is not believed), transformers 5's rope."""
    config, tensors = zlab(net)
    del config["auto_map"], config["rope_theta"], config["rope_scaling"]
    config["dflash_config"]["block_size"] = net.block_size
    return {**config, "block_size": 99, "rope_parameters": dict(net.rope)}, tensors


def zlab_flat(net: Net) -> tuple[dict, dict]:
    """Alpamayo: everything at the top level."""
    config, tensors = zlab(net)
    nested = config.pop("dflash_config")
    return {**config, **nested}, tensors


def modelopt(net: Net) -> tuple[dict, dict]:
    config, tensors = zlab(net)
    config.pop("auto_map")
    config.pop("is_causal", None)
    config["dflash_config"]["causal"] = net.causal[0]
    if net.windows[0] is not None:
        config["dflash_config"].update(use_swa=True, swa_window_size=net.windows[0])
        config.update(layer_types=["full_attention"] * len(net.windows), use_sliding_window=False, sliding_window=None)
    return config, {f"dflash_module.{name}": tensor for name, tensor in tensors.items()}


def speculators_new(net: Net) -> tuple[dict, dict]:
    kind = "dflash2" if net.num_candidates else "dflash"
    layer = layer_fields(net)
    del layer["rope_theta"], layer["rope_scaling"]
    layer["rope_parameters"] = dict(net.rope)
    config = {
        "architectures": ["DFlash2DraftModel" if net.num_candidates else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy"},
        "transformer_layer_config": layer,
        "draft_vocab_size": net.vocab_size if net.kept is None else len(net.kept),
        "block_size": net.block_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": list(net.aux_layers),
        "mask_token_id": MASK,
        "sliding_window_non_causal": not any(net.causal),
        "sample_from_anchor": net.first_slot == 0,
        **{name: value for name, value in extras(net).items() if name.startswith(("conv", "selector"))},
    }
    return config, {**net.tensors, **vocabulary_maps(net)}


def speculators_old(net: Net) -> tuple[dict, dict]:
    """Before transformers 5's spelling, and with fields that had no default yet left out."""
    config, tensors = speculators_new(net)
    config["transformer_layer_config"] = layer_fields(net)
    config.update(architectures=["DFlashDraftModel"], speculators_version="0.4.0")
    if not config["sample_from_anchor"]:
        del config["sample_from_anchor"]
    return config, tensors


def vocabulary_maps(net: Net) -> dict[str, torch.Tensor]:
    if net.kept is None:
        return {}
    kept = torch.zeros(net.vocab_size, dtype=torch.bool).index_fill_(0, net.kept, True)
    return {"d2t": net.kept - torch.arange(len(net.kept)), "t2d": kept}


def native(net: Net) -> tuple[dict, dict]:
    """transformers' own class, whose windows include the token at their distance."""
    config = {name: value for name, value in layer_fields(net).items() if name not in ("rope_theta", "rope_scaling")}
    if config["sliding_window"] is None:
        del config["sliding_window"]
    else:
        config["sliding_window"] -= 1
    for name in ("vocab_size", "use_sliding_window", "max_window_layers", "attention_bias"):
        del config[name]
    config.update(
        architectures=["MuseGlimmerAssistantModel"],
        model_type="muse_glimmer_assistant",
        rope_parameters=dict(net.rope),
        block_size=net.block_size,
        mask_token_id=MASK,
        target_layer_ids=leaving(net),
    )
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return config, {names.get(name, name): tensor for name, tensor in net.tensors.items()}


ZLAB: dict[str, Callable[[Net], tuple[dict, dict]]] = {
    "z-lab": zlab,
    "z-lab, new": zlab_new,
    "z-lab, flat": zlab_flat,
}
SPECULATORS = {"speculators, old": speculators_old, "speculators, new": speculators_new}
FORMATS = {**ZLAB, "ModelOpt": modelopt, **SPECULATORS, "transformers": native}


def write_net(folder: Path, net: Net, format: str = "z-lab", **config) -> Path:
    """A drafter in one format, with fields of its config replaced."""
    fields, tensors = FORMATS[format](net)
    return write(folder, {**fields, **config}, tensors)
