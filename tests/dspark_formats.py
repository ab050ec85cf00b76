"""DSpark drafters with random weights, written in every published format.

One canonical drafter: tensors under DeepSpec's names, and the facts that configs spell differently.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from eagle3_formats import AUX_LAYERS, write
from tiny import VOCAB_SIZE

BLOCK_SIZE, MASK, RANK, INTERMEDIATE = 5, 4, 8, 80


@dataclass(frozen=True)
class Drafter:
    """A drafter and what its config has to say.

    Args:
        tensors: canonical names; `kept` below is not among them.
        kept: [Vd] target ids of the draft tokens, None where it drafts all of them.
        aux_layers: what it reads (entering ids), of a target of `target_layers` layers.
        first_slot: the first row of a block that guesses.
        windows, causal: of each layer.
        from_anchor: windows are speculators' own.
        kind: of the Markov head.
        gemma4: whether its layers are Gemma 4's.
        cap: of the logits, None without one.
    """

    tensors: dict[str, torch.Tensor]
    kept: torch.Tensor | None
    hidden_size: int
    vocab_size: int
    head_dim: int
    target_layers: int
    aux_layers: tuple[int, ...]
    first_slot: int = 0
    block_size: int = BLOCK_SIZE
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    from_anchor: bool = False
    kind: str = "vanilla"
    gemma4: bool = False
    cap: float | None = None
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_slot

    @property
    def rank(self) -> int:
        w1 = self.tensors.get("markov_head.markov_w1.weight")
        return 0 if w1 is None else w1.shape[1]

    def heads(self, name: str) -> int:
        return self.tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0] // self.head_dim

    def with_tensors(self, **changes: torch.Tensor | None) -> "Drafter":
        """A copy with tensors replaced, added, or (None) left out; `__` stands for a dot."""
        tensors = {**self.tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        return replace(self, tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})


def random_drafter(
    seed: int = 0,
    *,
    hidden_size: int = 64,
    target_layers: int = 3,
    aux_layers: tuple[int, ...] | None = None,
    vocab_size: int = VOCAB_SIZE,
    draft_vocab_size: int | None = None,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    rank: int = RANK,
    confidence: bool = True,
    confidence_reads_markov: bool = True,
    values_are_keys: bool = True,
    own_embedding: bool = False,
    std: float = 0.12,
    **facts,
) -> Drafter:
    """A drafter whose every tensor is random, norms too, so that none could be swapped for another unseen."""
    generator = torch.Generator().manual_seed(seed)
    aux_layers = AUX_LAYERS[target_layers] if aux_layers is None else aux_layers
    draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
    windows, gemma4 = facts.get("windows", (None, None)), facts.get("gemma4", False)
    queries, keys = num_heads * head_dim, num_key_value_heads * head_dim
    tensors: dict[str, torch.Tensor] = {}

    def weight(name: str, *shape: int, scale: float = std, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(*shape, generator=generator) * scale
        if bias:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.3

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.3 * torch.randn(size, generator=generator)

    weight("fc", hidden_size, len(aux_layers) * hidden_size)
    norm("hidden_norm", hidden_size)
    for i in range(len(windows)):
        layer = f"layers.{i}"
        weight(f"{layer}.self_attn.q_proj", queries, hidden_size)
        weight(f"{layer}.self_attn.k_proj", keys, hidden_size)
        if not (gemma4 and values_are_keys):
            weight(f"{layer}.self_attn.v_proj", keys, hidden_size)
        weight(f"{layer}.self_attn.o_proj", hidden_size, queries)
        weight(f"{layer}.mlp.gate_proj", INTERMEDIATE, hidden_size)
        weight(f"{layer}.mlp.up_proj", INTERMEDIATE, hidden_size)
        weight(f"{layer}.mlp.down_proj", hidden_size, INTERMEDIATE)
        norm(f"{layer}.input_layernorm", hidden_size)
        norm(f"{layer}.post_attention_layernorm", hidden_size)
        norm(f"{layer}.self_attn.q_norm", head_dim)
        norm(f"{layer}.self_attn.k_norm", head_dim)
        if gemma4:
            for name in ("q_norm", "k_norm"):  # unscaled products of wider ones would magnify fp32's rounding
                tensors[f"{layer}.self_attn.{name}.weight"] *= 0.6
            norm(f"{layer}.pre_feedforward_layernorm", hidden_size)
            norm(f"{layer}.post_feedforward_layernorm", hidden_size)
            tensors[f"{layer}.layer_scalar"] = torch.rand(1, generator=generator) + 0.5
    norm("norm", hidden_size)
    weight("lm_head", draft_vocab_size, hidden_size)
    if own_embedding:
        weight("embed_tokens", vocab_size, hidden_size, scale=0.5)
    if rank:
        weight("markov_head.markov_w1", vocab_size, rank, scale=0.8)
        weight("markov_head.markov_w2", draft_vocab_size, rank, scale=0.5)
        if facts.get("kind") == "gated":
            weight("markov_head.gate_proj", rank, hidden_size + rank, bias=True)
        elif facts.get("kind") == "rnn":
            weight("markov_head.joint_proj", 3 * rank, 2 * rank + hidden_size, bias=True)
    if confidence:
        width = hidden_size + (rank if confidence_reads_markov else 0)
        weight("confidence_head.proj", 1, width, bias=True)
    kept = None
    if draft_vocab_size < vocab_size:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    return Drafter(
        tensors=tensors,
        kept=kept,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        head_dim=head_dim,
        target_layers=target_layers,
        aux_layers=aux_layers,
        **facts,
    )


GEMMA4 = dict(
    gemma4=True,
    num_key_value_heads=1,
    cap=3.0,
    rope={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
)


def layer_fields(drafter: Drafter) -> dict:
    rope = dict(drafter.rope)
    window = max((w for w in drafter.windows if w is not None), default=None)
    return {
        "model_type": "qwen3",
        "hidden_size": drafter.hidden_size,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": drafter.heads("q"),
        "num_key_value_heads": drafter.heads("k"),
        "num_hidden_layers": len(drafter.windows),
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": drafter.vocab_size,
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in drafter.windows],
        "sliding_window": window,
    }


def head_fields(drafter: Drafter) -> dict:
    confidence = drafter.tensors.get("confidence_head.proj.weight")
    fields: dict = {"markov_rank": drafter.rank, "enable_confidence_head": confidence is not None}
    fields.update({"markov_head_type": drafter.kind} if drafter.rank else {})
    if confidence is not None:
        fields["confidence_head_with_markov"] = confidence.shape[1] > drafter.hidden_size
    return fields


def deepspec(drafter: Drafter) -> tuple[dict, dict]:
    """Flat fields over a copy of the target's config."""
    config = {
        **layer_fields(drafter),
        **head_fields(drafter),
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": drafter.target_layers,
        "target_layer_ids": [i - 1 for i in drafter.aux_layers],
        "block_size": drafter.block_size,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "dtype": "bfloat16",
    }
    if any(drafter.windows) or any(drafter.causal):  # without the field, layers with windows would be causal
        config["is_causal"] = drafter.causal[0]
    if drafter.gemma4:
        del config["hidden_act"]
        sliding = {"rope_type": "default", "rope_theta": 10000.0}
        config.update(
            architectures=["Gemma4DSparkModel"],
            model_type="gemma4_text",
            hidden_activation="gelu_pytorch_tanh",
            head_dim=2 * drafter.head_dim,  # of the target's sliding layers
            global_head_dim=drafter.head_dim,
            num_global_key_value_heads=drafter.heads("k"),
            num_key_value_heads=8,
            attention_k_eq_v="layers.0.self_attn.v_proj.weight" not in drafter.tensors,
            final_logit_softcapping=drafter.cap,
            rope_parameters={"full_attention": dict(drafter.rope), "sliding_attention": sliding},
            hidden_size_per_layer_input=0,
        )
    return config, dict(drafter.tensors)


def speculators(drafter: Drafter) -> tuple[dict, dict]:
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.num_drafts}],
            "verifier": {"name_or_path": "org/target"},
        },
        "transformer_layer_config": layer_fields(drafter),
        "draft_vocab_size": len(drafter.tensors.get("lm_head.weight", range(drafter.vocab_size))),
        "block_size": drafter.block_size,
        "aux_hidden_state_layer_ids": list(drafter.aux_layers),
        "mask_token_id": MASK,
        "target_hidden_size": None,
        "sliding_window_non_causal": not any(drafter.causal),
        "sample_from_anchor": drafter.first_slot == 0,
        **head_fields(drafter),
    }
    tensors = {**drafter.tensors, "verifier_norm.weight": torch.ones(drafter.hidden_size)}
    if drafter.kept is not None:
        tensors["d2t"] = drafter.kept - torch.arange(len(drafter.kept))
        tensors["t2d"] = torch.zeros(drafter.vocab_size, dtype=torch.bool).index_fill_(0, drafter.kept, True)
    return config, tensors


def specforge(drafter: Drafter) -> tuple[dict, dict]:
    """Qwen3's config, and the method's fields in `dflash_config`; the early files nest the heads once more."""
    config = {
        **layer_fields(drafter),
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": drafter.block_size,
        "num_target_layers": drafter.target_layers,
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "target_layer_ids": [i - 1 for i in drafter.aux_layers],
            "mask_token_id": MASK,
            "confidence_head_alpha": 1.0,
            **head_fields(drafter),
        },
    }
    config.update({"sample_from_anchor": False} if drafter.first_slot else {})
    nested = ("markov_head.", "confidence_head.")
    return config, {
        f"logit_head.{name}" if name.startswith(nested) else name: tensor for name, tensor in drafter.tensors.items()
    }


def modelopt(drafter: Drafter) -> tuple[dict, dict]:
    config, _ = specforge(drafter)
    config["dflash_config"].update(causal=drafter.causal[0], shift_label=drafter.first_slot == 0)
    for name in ("enable_confidence_head", "confidence_head_with_markov", "attention_mode"):
        config["dflash_config"].pop(name, None)
    config["dflash_config"]["use_confidence_head"] = "confidence_head.proj.weight" in drafter.tensors
    config.pop("sample_from_anchor", None)
    return config, {
        name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj."): tensor
        for name, tensor in drafter.tensors.items()
    }


FORMATS: dict[str, Callable[[Drafter], tuple[dict, dict]]] = {
    "DeepSpec": deepspec,
    "speculators": speculators,
    "SpecForge": specforge,
    "ModelOpt": modelopt,
}


def write_drafter(folder: Path, drafter: Drafter, format: str = "DeepSpec", **config) -> Path:
    """A drafter in one format, with fields of its config replaced."""
    fields, tensors = FORMATS[format](drafter)
    return write(folder, {**fields, **config}, tensors)
