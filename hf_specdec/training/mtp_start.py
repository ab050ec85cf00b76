"""Where the training of an MTP layer starts: near what the target itself would do.

Its decoder layer and its final norm are copies of the target's last ones. Its projection is fitted by least squares:
from the state after one token and the embedding of the next to what the target's last layer reads at the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..drafters.mtp.families import family_of
from ..drafters.mtp.layers import final_norm_of
from ..drafters.mtp.modeling import MtpModel
from .batches import Batch

_RIDGE = 1e-2


def check_attends(target: PreTrainedModel) -> None:
    """Refuse a target whose last layer is not one that a training-time test can unroll.

    Raises:
        ValueError: it is no attention layer, has several residual streams, or is not where it is looked for.
    """
    decoder = target.get_decoder()
    if hasattr(decoder, "hc_head") or hasattr(decoder, "hyper_connection_mixer"):
        raise ValueError(
            f"target: the layers of {type(target).__name__} pass on several residual streams (hyper-connections), of "
            "which no MTP layer is made; take a drafter that needs no training, 'lookup' for instance."
        )
    layers = getattr(decoder, "layers", None)
    if layers is None or not hasattr(layers[-1], "self_attn"):
        raise ValueError(
            f"target: the last layer of {type(target).__name__} is no attention layer under the names that most "
            "models have (`layers`, `self_attn`), so no MTP layer is made of it; train 'eagle3' instead."
        )


@torch.no_grad()
def new_mtp_layer(target: PreTrainedModel, batches: Iterable[Batch]) -> MtpModel:
    """An MTP layer in fp32 on the target's device.

    Args:
        target: the model to draft for.
        batches: some of the data.
    """
    family = family_of("deepseek_v3")
    assert family is not None
    model, decoder = MtpModel(target, family, 1).float().to(target.device), target.get_decoder()
    layer: Any = model.layers[0]
    layer.blocks[0].load_state_dict(decoder.layers[-1].state_dict())
    norm: Any = final_norm_of(decoder)
    layer.final_norm.load_state_dict(norm.state_dict())
    embedding: Any = target.get_input_embeddings()
    moment, products = torch.zeros(2, 1, 1, dtype=torch.double, device=target.device)
    for batch in batches:
        batch = batch.to(target.device)
        read = target(batch.ids, output_hidden_states=True, logits_to_keep=1).hidden_states[-2]  # by its last layer
        columns = torch.arange(1, batch.ids.shape[1], device=target.device)
        real = columns < batch.lengths[:, None]
        embedded = layer.embedding_norm(F.embedding(batch.ids[:, 1:], embedding.weight)[real].float())
        inputs = torch.cat([embedded, layer.hidden_norm(batch.states[:, :-1, -1][real].float())], dim=-1)
        outputs = read[:, 1:][real].float()
        weighted = inputs / outputs.square().mean(dim=-1, keepdim=True)  # an error counts as a share of the output
        moment, products = moment + (weighted.T @ inputs).double(), products + (weighted.T @ outputs).double()
    moment = moment + _RIDGE * moment.diagonal().mean() * torch.eye(len(moment), device=target.device)
    layer.projection.weight.copy_(torch.linalg.solve(moment, products).T)
    return model
