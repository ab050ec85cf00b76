"""What fields and tensors of a DSpark checkpoint say about its Markov and confidence heads."""

from __future__ import annotations

import torch

from ..auto import Repository
from ..common.block_config import BlockConfig
from ..common.config_files import needed
from ..common.fields import Fields
from .modeling import MARKOV_KINDS, DSparkHeads

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_KIND_TENSORS = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
_CONFIDENCE = "confidence_head.proj.weight"


def read_heads(
    repository: Repository, tensors: dict[str, torch.Tensor], own: Fields, config: BlockConfig
) -> DSparkHeads:
    """What stands behind the network `config`; `own` are the fields of the method.

    Raises:
        ValueError: fields and tensors contradict each other.
    """
    rank = needed(repository, tensors, W1).shape[1] if W1 in tensors else 0
    if own.integer("markov_rank", rank, least=0) != rank:
        raise ValueError(
            f"{repository.path} says markov_rank is {own.content['markov_rank']} and its {W1} makes it {rank}; one of "
            "the two is wrong."
        )
    kind = next((kind for kind, name in _KIND_TENSORS.items() if name in tensors), "vanilla")
    declared = own.text("markov_head_type", kind)
    if rank and declared != kind:
        served = ", ".join(map(repr, MARKOV_KINDS))
        raise ValueError(
            f"{repository.path} says markov_head_type is {declared!r} and its tensors make it {kind!r}; {served} are "
            "served."
        )
    for field in ("enable_confidence_head", "use_confidence_head"):
        if own.flag(field, False) and _CONFIDENCE not in tensors:
            raise ValueError(f"{repository.path} says {field} is True and lacks the tensor {_CONFIDENCE}.")
    reads_markov = False
    if _CONFIDENCE in tensors:
        width, size = needed(repository, tensors, _CONFIDENCE).shape[1], config.hidden_size
        if width not in (size, size + rank):
            raise ValueError(
                f"{repository.path} has a {_CONFIDENCE} for {width} inputs where {size} or {size + rank} are expected."
            )
        reads_markov = width != size
    temperatures = own.numbers("confidence_temperatures")
    if temperatures and len(temperatures) < config.num_drafts:
        raise ValueError(
            f"config.json in {repository.path} has {len(temperatures)} confidence_temperatures for {config.num_drafts} "
            "drafted tokens; calibrate it again, or leave them out."
        )
    return DSparkHeads(
        markov_rank=rank,
        markov_kind=kind,
        confidence=_CONFIDENCE in tensors,
        confidence_reads_markov=reads_markov,
        confidence_bias="confidence_head.proj.bias" in tensors,
        confidence_temperatures=temperatures,
    )
