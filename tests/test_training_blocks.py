"""Training block drafters: what is trained is what drafts, and losses and hits are those of their definitions."""

import dataclasses
import math

import pytest
import torch
from test_training_eagle3 import batch_of, random_text
from tiny import TARGETS, VOCAB_SIZE, tiny_config, tiny_target
from torch.nn import functional as F

from hf_specdec.drafters.common.rotary import rotate
from hf_specdec.training import blocks
from hf_specdec.training.blocks import BlockOptions, BlockTraining, DSparkOptions, new_block_drafter

LAYERS = (0, 1, 2)
KEPT = torch.arange(3, VOCAB_SIZE - 10)
SMALL = dict(num_drafts=4, num_layers=2, intermediate_size=48, mask_token_id=5, anchor_stride=1)
DFLASH = BlockOptions(**SMALL)
DSPARK = DSparkOptions(**SMALL, markov_rank=8)
OPTIONS = {
    "DFlash": DFLASH,
    "DFlash, D-PACE": dataclasses.replace(DFLASH, dpace=0.5, cross_entropy=2.0),
    "DSpark": DSPARK,
    "DSpark, gated": dataclasses.replace(DSPARK, markov_kind="gated", decay=1.5),
    "DSpark, rnn": dataclasses.replace(DSPARK, markov_kind="rnn", dpace=0.3),
    "DSpark without a Markov head": dataclasses.replace(DSPARK, markov_rank=0),
    "DSpark without confidence": dataclasses.replace(DSPARK, confidence=0.0),
}


def training_of(options: BlockOptions, target=None, seed: int = 0, **config) -> BlockTraining:
    """A random drafter, far from where training would start it."""
    target = target or tiny_target("llama")
    torch.manual_seed(seed)
    model = new_block_drafter(target, LAYERS, len(KEPT), options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else torch.nn.init.uniform_(parameter, 0.5, 2)
    model.config = dataclasses.replace(model.config, **config)
    return BlockTraining(model, target, KEPT, options).eval()


class OneBlock:
    """The attention of a single block over the context before it, entry by entry."""

    def __init__(self, config, reach: int = 0) -> None:
        self.config, self.reach = config, reach

    def __call__(self, index, queries, keys, values):
        window, causal, n = self.config.windows[index], self.config.causal[index], queries.shape[2]
        groups, anchor = queries.shape[1] // keys.shape[1], keys.shape[2] - n
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        mixed = torch.empty_like(queries)
        for row in range(n):
            seen = [
                column
                for column in range(anchor + n)
                if (window is None or abs(anchor + row - column) < window)
                and not (causal and column > anchor + row + self.reach)
            ]
            scores = queries[:, :, row, None] @ keys[:, :, seen].transpose(-1, -2) / math.sqrt(queries.shape[-1])
            mixed[:, :, row] = (scores.softmax(dim=-1) @ values[:, :, seen])[:, :, 0]
        return mixed


def drafted_states(training: BlockTraining, text: list[int], states: torch.Tensor, anchor: int, attention=OneBlock):
    """[num_drafts, H] by itself: a block at `anchor` of a text [n] with the target's states [n, T, H]."""
    model, config = training.model, training.model.config
    context = model.fuse([states[None, :anchor, i] for i in range(len(LAYERS))])
    tokens = torch.tensor([[text[anchor]] + [config.mask_token_id] * (config.block_size - 1)])
    positions = torch.arange(anchor + config.block_size)[None]
    embedded = F.embedding(tokens, training.embedding)[:, None]
    return model(embedded, context, positions, attention(config))[0, 0, config.first_slot :]


def slot_logits(training: BlockTraining, text: list[int], states: torch.Tensor, anchor: int) -> torch.Tensor:
    """[num_drafts, Vd] fp64 logits of a block, each slot after the text's own tokens; and the confidence's."""
    h, model = drafted_states(training, text, states, anchor), training.model
    rows, memory, sure = [], None, []
    for slot in range(len(h)):
        row = training.lm_head(h[slot])
        previous = torch.tensor(text[min(anchor + slot, len(text) - 1)])
        if getattr(model, "markov_head", None) is not None:
            bias, memory = model.markov_head(previous, h[slot], memory)
            row = row + bias
        rows.append(row.double())
        if getattr(model, "confidence_head", None) is not None:
            w1 = None if model.markov_head is None else model.markov_head.markov_w1(previous)
            sure.append(model.confidence_head(h[slot], w1).double())
    return torch.stack(rows), torch.stack(sure) if sure else None


@pytest.mark.parametrize(
    ("windows", "causal"),
    [((None, None), (False, False)), ((4, None), (True, False)), ((3, 5), (False, False)), ((2, 6), (True, True))],
)
@pytest.mark.parametrize("options", [DFLASH, DSPARK], ids=["DFlash", "DSpark"])
@torch.no_grad()
def test_every_block_is_what_drafting_computes_there(options, windows, causal):
    target, texts = tiny_target("llama"), [random_text(13), random_text(8, seed=1)]
    training, batch = training_of(options, windows=windows, causal=causal), batch_of(target, texts, [3, 2], junk=50)
    anchors = torch.arange(1, 12).expand(2, -1)
    found = training.states(batch, anchors)
    for row, text in enumerate(texts):
        for place, anchor in enumerate(range(1, len(text) - 1)):
            expected = drafted_states(training, text, batch.states[row], anchor)
            torch.testing.assert_close(found[row, place], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_that_sees_its_successor_would_show():
    """Negative control, on causal layers."""
    target, text = tiny_target("llama"), random_text(13)
    training = training_of(DFLASH, windows=(6, 6), causal=(True, True))
    batch = batch_of(target, [text], [3])
    found = training.states(batch, torch.tensor([[6]]))[0, 0]
    wrong = drafted_states(training, text, batch.states[0], 6, lambda config: OneBlock(config, reach=1))
    assert (found - wrong).abs().max() > 1e-2


@torch.no_grad()
def test_a_block_that_knows_its_anchors_state_would_show():
    """Negative control: the target has not processed the anchor."""
    target, text = tiny_target("llama"), random_text(13)
    training, batch = training_of(DFLASH), batch_of(target, [text], [3])
    before = training.states(batch, torch.tensor([[6]]))
    batch.states[:, 6:] += 1.0
    assert torch.equal(training.states(batch, torch.tensor([[6]])), before)
    batch.states[:, 5] += 1.0
    assert not torch.allclose(training.states(batch, torch.tensor([[6]])), before)


def definition(training: BlockTraining, target, texts: list[list[int]], prompt_lengths: list[int]):
    """(loss, hits, rows) by the formulas, one slot at a time in fp64."""
    options, kept = training.options, KEPT.tolist()
    drafting, weights, missed = [], [], []
    hits, rows = [0] * options.num_drafts, [0] * options.num_drafts
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        states = batch_of(target, [text], [prompt_length]).states[0]
        laws = F.linear(states[:, -1], training.head).double().softmax(dim=-1)
        for anchor in range(prompt_length, len(text) - 1):
            logits, sure = slot_logits(training, text, states, anchor)
            reached, alive = 1.0, True
            block = []
            for slot in range(min(options.num_drafts, len(text) - 1 - anchor)):
                answer = text[anchor + slot + 1]
                rows[slot] += 1
                alive = alive and kept[int(logits[slot].argmax())] == answer
                hits[slot] += alive
                if answer not in kept:
                    reached = 0.0
                    continue
                q, p = logits[slot].softmax(-1), laws[anchor + slot]
                apart = (q - p).abs().sum()
                one = -options.cross_entropy * (p * q.log()).sum() + getattr(options, "distance", 0.0) * apart
                drafting.append(one)
                if options.dpace is not None:
                    chance = float(q[kept.index(answer)].detach())
                    reached *= (1 - options.dpace) * chance + options.dpace
                block.append((slot, reached))
                if sure is not None:
                    aim = (1 - 0.5 * apart).detach()
                    missed.append(F.binary_cross_entropy_with_logits(sure[slot], aim))
            for slot, _ in block:
                later = sum(r for s, r in block if s >= slot)
                weights.append(math.exp(-slot / options.decay) if options.dpace is None else later)
    weighed = torch.tensor(weights, dtype=torch.float64)
    loss = (torch.stack(drafting) * weighed).sum() / weighed.sum()
    if missed:
        loss = loss + options.confidence * (torch.stack(missed) * weighed).sum() / weighed.sum()
    return loss, hits, rows


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_hits_are_those_of_their_definitions(name):
    target, texts, prompt_lengths = tiny_target("llama"), [random_text(14), random_text(9, seed=1)], [4, 2]
    training = training_of(OPTIONS[name])
    # Texts that the drafter guesses right now and then.
    with torch.no_grad():
        for text in texts:
            for place in range(5, len(text) - 1, 3):
                states = batch_of(target, [text], [3]).states[0]
                text[place + 1] = int(KEPT[slot_logits(training, text, states, place)[0][0].argmax()])
    expected, hits, rows = definition(training, target, texts, prompt_lengths)
    scores = training(batch_of(target, texts, prompt_lengths, width=17, junk=50))
    torch.testing.assert_close(scores.loss.double(), expected, atol=1e-4, rtol=1e-5)
    assert scores.num_hits.tolist() == hits and scores.num_rows.tolist() == rows
    assert hits[0] > 2


def test_confidence_trains_its_head_alone_where_it_is_detached():
    target, texts = tiny_target("llama"), [random_text(14)]
    batch = batch_of(target, texts, [3])
    grads = []
    for detached in (False, True):
        options = dataclasses.replace(DSPARK, cross_entropy=0.0, distance=0.0, confidence_detached=detached)
        training = training_of(options)
        training(batch).loss.backward()
        model = training.model
        grads.append([float(p.grad.abs().sum()) for p in (model.fc.weight, model.markov_head.markov_w1.weight)])
        assert model.confidence_head.proj.weight.grad.abs().sum() > 0
    assert grads[0][0] > 0 and grads[0][1] > 0 and grads[1] == [0.0, 0.0]


def test_anchors_move_from_step_to_step_and_stand_still_in_evaluation():
    target, batch = tiny_target("llama"), batch_of(tiny_target("llama"), [random_text(20)], [4])
    training = training_of(dataclasses.replace(DFLASH, anchor_stride=4), target)
    assert {tuple(training._anchors(batch)[0][0].tolist()) for _ in range(8)} == {(4, 8, 12, 16)}
    training.train()
    starts = {int(training._anchors(batch)[0][0, 0]) for _ in range(64)}
    assert starts == {4, 5, 6, 7}


@pytest.mark.parametrize("options", [DFLASH, DSPARK], ids=["DFlash", "DSpark"])
def test_a_batch_that_teaches_nothing_costs_nothing(options):
    target = tiny_target("llama")
    training = training_of(options)
    scores = training(batch_of(target, [random_text(4)], [3]))
    assert scores.loss.item() == 0 and scores.num_rows.tolist() == [0] * 4
    scores.loss.backward()
    assert all(parameter.grad is not None for parameter in training.parameters()), "every process must have gradients"


@pytest.mark.parametrize("options", [DFLASH, DSPARK], ids=["DFlash", "DSpark"])
def test_the_drafter_learns_and_the_target_stays(options):
    target = tiny_target("llama")
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    training = training_of(options).train()
    batch = batch_of(target, [random_text(20), random_text(16, seed=1)], [3, 5])
    optimizer = torch.optim.AdamW(training.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = training(batch).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in training.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_drafter_has_the_targets_head_for_every_family(name):
    target = tiny_target(name)
    layers = tuple(range(min(3, tiny_config(name).num_hidden_layers)))
    for options in (DFLASH, DSPARK):
        model = new_block_drafter(target, layers, len(KEPT), options)
        training = BlockTraining(model, target, KEPT, options)
        assert torch.equal(training.lm_head.weight, target.get_output_embeddings().weight[KEPT])
        assert model.config.num_drafts == 4
    assert blocks.DSparkOptions().markov_rank == 256 and rotate is not None
