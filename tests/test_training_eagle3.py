"""Training an EAGLE-3 head: what is trained is what drafts, and the scores are those of their definitions."""

import copy
import dataclasses
import math

import pytest
import torch
from eagle3_formats import Head, random_head, write_head
from eagle3_reference import Reference
from tiny import TARGETS, VOCAB_SIZE, prompts, tiny_config, tiny_target
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter
from hf_specdec.training import eagle3
from hf_specdec.training.batches import Batch
from hf_specdec.training.eagle3 import Eagle3Training, new_head

LAYERS = (0, 1, 2)
STEPS, DECAY = 4, 0.7
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": dict(),
    "residual after the norm": dict(flags=("norm_before_residual",)),
    "norm before fc": dict(flags=("norm_before_fc", "norm_before_residual")),
    "EAGLE-3.1": dict(flags=("fc_norm", "norm_output")),
    "post-norm state fed back": dict(flags=("norm_output",)),
    "two layers": dict(num_layers=2),
    "three qwen3 layers": dict(num_layers=3, qk_norm=True),
    "all tokens": dict(draft_vocab_size=VOCAB_SIZE),
    "sliding window": dict(windows=(6,)),
    "window shorter than a draft": dict(windows=(2,)),
    "layers with and without a window": dict(num_layers=2, windows=(None, 4)),
    "all biases": dict(biases=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")),
    "llama3 rope": dict(rope=LLAMA3_ROPE),
}


def random_text(length: int, seed: int = 0) -> list[int]:
    return prompts([length], seed=seed)["input_ids"][0].tolist()


def training_of(tmp_path, head: Head, target, format: str = "speculators, old") -> Eagle3Training:
    """The trainer of a head that was loaded as it is for drafting."""
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path / "head", head, format), target=target)
    kept = torch.arange(VOCAB_SIZE) if drafter.target_ids is None else drafter.target_ids
    return Eagle3Training(drafter.model.requires_grad_(True), target, kept, STEPS, DECAY)


def batch_of(target, texts: list[list[int]], prompt_lengths: list[int], width: int = 0, junk: int = 0) -> Batch:
    """Texts with their hidden states, each from a forward of its own; beyond the texts lies `junk`."""
    width = max(width, *(len(text) for text in texts))
    ids = torch.full((len(texts), width), junk)
    states = torch.full((len(texts), width, len(LAYERS) + 1, target.config.hidden_size), float(junk))
    for row, text in enumerate(texts):
        with torch.no_grad():
            seen = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        ids[row, : len(text)] = torch.tensor(text)
        states[row, : len(text)] = torch.stack([seen[i][0] for i in (*LAYERS, -1)], dim=1)
        states[row, len(text) - 1] = 0
    return Batch(ids, torch.tensor([len(text) for text in texts]), torch.tensor(prompt_lengths), states)


def unrolled_logits(training: Eagle3Training, batch: Batch) -> torch.Tensor:
    """[depths, B, L, Vd]."""
    with torch.no_grad():
        return torch.stack([training.model.lm_head(training.model.norm(out)) for out in training.unroll(batch)])


def drafted_logits(reference: Reference, text: list[int], root: int, count: int) -> torch.Tensor:
    """[count, Vd] by the formulas: what drafting gives after text[:root] while it drafts what the text goes on with."""
    full = reference(text[:root], [*text[root : root + count - 1], 0])
    return full if reference.head.kept is None else full[:, reference.head.kept]


def largest_error(training: Eagle3Training, target, reference: Reference, text: list[int], batch: Batch | None = None):
    """Over every row, at every depth whose tokens the text still holds."""
    found = unrolled_logits(training, batch or batch_of(target, [text], [3]))[:, 0]
    worst = 0.0
    for row in range(len(text) - 1):
        count = min(STEPS, len(text) - 1 - row)
        expected = drafted_logits(reference, text, row + 2, count)
        worst = max(worst, float((found[:count, row].double() - expected).abs().max()))
    return worst


# What is trained is what drafts


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_and_depth_is_what_drafting_computes_there(tmp_path, variant):
    target, head = tiny_target("llama"), random_head(seed=3, aux_layers=LAYERS, **VARIANTS[variant])
    training = training_of(tmp_path, head, target)
    assert largest_error(training, target, Reference(head, target), random_text(12)) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral", "gpt2"])
def test_it_is_so_for_every_family_of_targets(tmp_path, name):
    layers = tiny_config(name).num_hidden_layers
    target, head = tiny_target(name), random_head(seed=4, target_layers=layers, aux_layers=LAYERS)
    training = training_of(tmp_path, head, target)
    assert largest_error(training, target, Reference(head, target), random_text(14, seed=1)) < 1e-5


class NaiveAttention:
    """The rule of UnrolledAttention, entry by entry; `reach` rows further than it allows."""

    def __init__(self, config, reach: int) -> None:
        self.depth, self.reach, self.entries = 0, reach, [[] for _ in config.windows]

    def __call__(self, index, queries, keys, values):
        groups = queries.shape[1] // keys.shape[1]
        self.entries[index].append((keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)))
        (first_keys, first_values), later = self.entries[index][0], self.entries[index][1:]
        mixed = torch.empty_like(queries)
        for row in range(queries.shape[2]):
            end = row + 1 + (self.reach if self.depth else 0)
            k = torch.cat([first_keys[:, :, :end], *(k[:, :, row : row + 1] for k, _ in later)], dim=2)
            v = torch.cat([first_values[:, :, :end], *(v[:, :, row : row + 1] for _, v in later)], dim=2)
            scores = (queries[:, :, row, None] @ k.transpose(-1, -2)) / math.sqrt(queries.shape[-1])
            mixed[:, :, row] = (scores.softmax(dim=-1) @ v)[:, :, 0]
        return mixed


@pytest.mark.parametrize("reach", [0, 1])
def test_a_row_that_sees_one_row_too_far_would_show(tmp_path, monkeypatch, reach):
    """Negative control: the target has not been there when the head drafts."""
    target, head = tiny_target("llama"), random_head(seed=3, aux_layers=LAYERS)
    training = training_of(tmp_path, head, target)
    monkeypatch.setattr(eagle3, "UnrolledAttention", lambda config: NaiveAttention(config, reach))
    error = largest_error(training, target, Reference(head, target), random_text(12))
    assert error > 1e-3 if reach else error < 1e-5


def test_a_state_of_another_layer_would_show(tmp_path):
    target, head, text = tiny_target("llama"), random_head(seed=3, aux_layers=LAYERS), random_text(12)
    training, batch = training_of(tmp_path, head, target), batch_of(target, [text], [3])
    batch.states = batch.states[:, :, [1, 1, 2, 3]]
    assert largest_error(training, target, Reference(head, target), text, batch) > 1e-3


def test_feeding_the_other_state_back_would_show(tmp_path):
    target, head = tiny_target("llama"), random_head(seed=3, aux_layers=LAYERS)
    training = training_of(tmp_path, head, target)
    training.model.config = dataclasses.replace(training.model.config, norm_output=True)
    assert largest_error(training, target, Reference(head, target), random_text(12)) > 1e-3


# Scores


def half_predictable(reference: Reference, start: list[int], length: int, seed: int) -> list[int]:
    """A text in which greedy drafts of the head are right now and then: three of its tokens, then one of another's."""
    generator, text = torch.Generator().manual_seed(seed), list(start)
    while len(text) < length:
        drafted: list[int] = []
        for _ in range(3):
            drafted.append(int(reference(text, [*drafted, 0])[-1].argmax()))
        text += [*drafted, int(torch.randint(3, VOCAB_SIZE, (1,), generator=generator))]
    return text[:length]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """(training, reference, target, texts, prompt lengths) of two texts of unlike lengths."""
    target, head = tiny_target("llama"), random_head(seed=3, aux_layers=LAYERS)
    reference = Reference(head, target)
    texts = [half_predictable(reference, random_text(6, seed=s), n, seed=s) for s, n in ((1, 24), (2, 15))]
    return training_of(tmp_path_factory.mktemp("scored"), head, target), reference, target, texts, [6, 2]


def test_the_loss_is_the_cross_entropy_with_the_targets_own_law(scored):
    training, reference, target, texts, prompt_lengths = scored
    kept, losses = reference.head.kept, [[] for _ in range(STEPS)]
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        with torch.no_grad():
            laws = target(torch.tensor([text])).logits[0, :, kept].double().softmax(dim=-1)
        for last in range(max(prompt_length, STEPS), len(text) - 1):  # the token that the target was asked after
            for depth in range(STEPS):
                if text[last + 1] in kept.tolist():
                    logits = drafted_logits(reference, text, last + 1 - depth, depth + 1)[depth]
                    losses[depth].append(-(laws[last] * logits.log_softmax(-1)).sum())
    expected = sum(torch.stack(one).mean() * DECAY**depth for depth, one in enumerate(losses))
    assert 8 < len(losses[0]) < sum(map(len, texts)) - 10, "some tokens should be outside of the draft vocabulary"
    found = training(batch_of(target, texts, prompt_lengths)).loss
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_hits_are_the_drafts_that_are_right_up_to_a_depth(scored):
    training, reference, target, texts, prompt_lengths = scored
    hits, rows = [0] * STEPS, [0] * STEPS
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        for root in range(max(prompt_length, STEPS) + 1, len(text)):  # a draft goes on from text[:root]
            count = min(STEPS, len(text) - root)
            logits = drafted_logits(reference, text, root, count)
            guesses = reference.head.kept[logits.argmax(dim=-1)].tolist()
            for depth in range(count):
                rows[depth] += 1
                hits[depth] += guesses[: depth + 1] == text[root : root + depth + 1]
    scores = training(batch_of(target, texts, prompt_lengths))
    assert scores.num_hits.tolist() == hits and scores.num_rows.tolist() == rows
    assert rows[0] > hits[0] > hits[1] > hits[2] > 0, "drafts should be right in part"


def test_padding_changes_nothing(scored):
    training, _, target, texts, prompt_lengths = scored
    together = batch_of(target, texts, prompt_lengths, width=31, junk=50)
    alone = [batch_of(target, [text], [n]) for text, n in zip(texts, prompt_lengths, strict=True)]
    logits, scores, single = unrolled_logits(training, together), training(together), [training(b) for b in alone]
    for row, (text, batch) in enumerate(zip(texts, alone, strict=True)):
        for depth, expected in enumerate(unrolled_logits(training, batch)[:, 0]):
            width = len(text) - 1 - depth  # rows whose token is not beyond the text
            torch.testing.assert_close(logits[depth, row, :width], expected[:width], atol=1e-5, rtol=1e-5)
    assert torch.equal(scores.num_hits, single[0].num_hits + single[1].num_hits)
    assert torch.equal(scores.num_rows, single[0].num_rows + single[1].num_rows)
    taught = [
        sum(training.draft_ids[text[max(n, STEPS) + 1 :]] >= 0) for text, n in zip(texts, prompt_lengths, strict=True)
    ]
    expected = (taught[0] * single[0].loss + taught[1] * single[1].loss) / sum(taught)
    torch.testing.assert_close(scores.loss, expected, atol=1e-5, rtol=0)


def test_a_batch_that_teaches_nothing_costs_nothing(scored):
    training, _, target, _, _ = scored
    scores = training(batch_of(target, [random_text(STEPS)], [1]))
    assert scores.loss.item() == 0 and scores.num_rows.tolist() == [0] * STEPS
    scores.loss.backward()
    assert all(parameter.grad is not None for parameter in training.parameters()), "every process must have gradients"


def test_the_head_learns_and_the_target_stays(tmp_path):
    target, head = tiny_target("llama"), random_head(seed=3, num_layers=2, qk_norm=True, aux_layers=LAYERS)
    training = training_of(tmp_path, head, target)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    assert {id(p) for p in training.parameters()} == {id(p) for p in training.model.parameters()}
    training(batch_of(target, [random_text(20), random_text(16, seed=1)], [3, 5])).loss.backward()
    for name, parameter in training.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters())
    torch.optim.SGD(training.parameters(), lr=1.0).step()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_states_and_target_may_be_of_another_precision_than_the_head(scored):
    training, reference, target, texts, prompt_lengths = scored
    batch = batch_of(target, texts, prompt_lengths)
    exact = training(batch).loss.item()
    batch.states = batch.states.bfloat16()
    rounded = Eagle3Training(training.model, copy.deepcopy(target).bfloat16(), reference.head.kept, STEPS, DECAY)
    assert rounded(batch).loss.item() == pytest.approx(exact, rel=0.02)


# A new head


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_head_drafts_for_every_family_of_targets(name):
    target, kept = tiny_target(name), torch.arange(3, 80, 2)
    torch.manual_seed(0)
    head = new_head(target, (0, 1), kept)
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[kept])
    inputs = prompts([7, 4])
    options = dict(max_new_tokens=12, do_sample=False)
    drafter = Eagle3Drafter(head.eval(), kept, num_draft_tokens=3).bind(target)
    assert torch.equal(
        target.generate(**inputs, **options, assistant_model=drafter), target.generate(**inputs, **options)
    )
    assert drafter.last_stats.num_drafted > 0


def test_a_target_that_caps_its_logits_is_refused_and_the_others_are_not():
    for name in TARGETS:
        eagle3.check_target(tiny_target(name))
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=0.1,
    )
    with pytest.raises(ValueError, match="target: the logits of Gemma2ForCausalLM are not its output head times"):
        eagle3.check_target(Gemma2ForCausalLM(config).eval())
