"""Where block drafters start: hidden states told apart, and near tokens first."""

import copy

import torch
from test_training_eagle3 import batch_of, random_text
from tiny import tiny_target
from torch.nn import functional as F

from hf_specdec.training.block_start import start_well
from hf_specdec.training.blocks import DSparkOptions, new_block_drafter

LAYERS = (0, 1, 2)


def constant_share(vectors: torch.Tensor) -> float:
    """How much of [N, H] is one vector; 1 where all are the same."""
    return float(vectors.mean(dim=0).norm() / vectors.norm(dim=-1).mean())


def nearness(model, embedding: torch.Tensor, contexts: list[torch.Tensor], anchors: range) -> torch.Tensor:
    """[heads] of the first layer: weight of the three nearest tokens of a context against three far ones."""
    seen = []

    def attend(index, queries, keys, values):
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        weights = (queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5).softmax(dim=-1)
        if index == 0:
            seen.append(weights[0, :, 0, : contexts[0].shape[1]].flip(-1))
        return weights @ values

    for context in contexts:
        for anchor in anchors:
            rows = torch.full((1, 1, model.config.block_size), model.config.mask_token_id)
            rows[..., 0] = anchor
            positions = torch.arange(context.shape[1] + rows.shape[-1])[None]
            model(F.embedding(rows, embedding), context, positions, attend)
    weights = torch.stack(seen).mean(dim=0)
    return weights[:, :3].mean(dim=-1) / weights[:, 20:].mean(dim=-1)


@torch.no_grad()
def test_states_that_are_nearly_constant_are_told_apart_and_near_tokens_come_first():
    target = tiny_target("llama")
    torch.manual_seed(0)
    model = new_block_drafter(target, LAYERS, 97, DSparkOptions(num_layers=2, mask_token_id=5, num_key_value_heads=4))
    random = copy.deepcopy(model)
    batches = [batch_of(target, [random_text(60, seed=s) for s in (t, t + 1)], [3, 5]) for t in range(0, 8, 2)]
    for batch in batches:
        batch.states[..., 7] += 40.0  # the massive activation of a real target
    embedding = target.get_input_embeddings().weight.clone()
    embedding[:, 3] += 0.7  # rows of a real one have a part in common
    start_well(model, embedding, batches)
    states = [[batch.states[:1, :-1, i] for i in range(len(LAYERS))] for batch in batches]
    before, after = ([one.fuse(state) for state in states] for one in (random, model))
    assert constant_share(before[0][0]) > 0.9 and constant_share(after[0][0]) < 0.3
    near = [nearness(one, embedding, contexts, range(10, 20)) for one, contexts in ((random, before), (model, after))]
    assert near[1][0] > 2.0 > near[0].max(), "the first head looks near"
    assert near[1][-1] < 1.5, "the last one everywhere"
