"""Training an MTP layer: what is trained is what drafts, the loss is over all tokens, the start is near the target."""

import copy
import dataclasses

import pytest
import torch
from mtp_formats import llama, random_target, write_standalone
from mtp_reference import Reference
from mtp_rounds import rounds_of
from tiny import TARGETS, VOCAB_SIZE, prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.mtp.session import MtpDrafter
from hf_specdec.export.mtp import save_mtp
from hf_specdec.training.batches import Batch
from hf_specdec.training.losses import part_of_head
from hf_specdec.training.mtp import MtpOptions, MtpTraining
from hf_specdec.training.mtp_start import check_attends, new_mtp_layer

OPTIONS = MtpOptions(num_steps=4, decay=0.7, num_frequent=40, num_negatives=20)


def random_text(length: int, seed: int = 0) -> list[int]:
    return prompts([length], seed=seed)["input_ids"][0].tolist()


def batch_of(target, texts: list[list[int]], prompt_lengths: list[int], width: int = 0, junk: int = 0) -> Batch:
    """Texts with their final states, each from a forward of its own; beyond the texts lies `junk`."""
    width = max(width, *(len(text) for text in texts))
    ids = torch.full((len(texts), width), junk)
    states = torch.full((len(texts), width, 1, target.config.hidden_size), float(junk))
    for row, text in enumerate(texts):
        with torch.no_grad():
            seen = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        ids[row, : len(text)] = torch.tensor(text)
        states[row, : len(text), 0] = seen[0]
        states[row, len(text) - 1] = 0
    return Batch(ids, torch.tensor([len(text) for text in texts]), torch.tensor(prompt_lengths), states)


def training_of(model, target, options: MtpOptions = OPTIONS) -> MtpTraining:
    return MtpTraining(model.requires_grad_(True), target, torch.arange(options.num_frequent), options).eval()


@pytest.fixture(scope="module")
def target():
    return random_target(llama())


@pytest.fixture
def training(tmp_path, target):
    """The trainer of a random layer that was loaded as it is for drafting."""
    drafter = AutoDrafter.from_pretrained(write_standalone(tmp_path / "layer", llama()), target=target)
    return training_of(drafter.model, target)


def unrolled_logits(training: MtpTraining, batch: Batch) -> torch.Tensor:
    """[depths, B, L, V]."""
    with torch.no_grad():
        return torch.stack([normed @ training.head.T for normed in training.unroll(batch)])


def largest_error(training: MtpTraining, target, text: list[int], variant: str = "") -> float:
    """Over every row, at every depth whose tokens the text still holds."""
    found, reference = (
        unrolled_logits(training, batch_of(target, [text], [3]))[:, 0],
        Reference(llama(), target, variant),
    )
    worst = 0.0
    for row in range(len(text) - 1):
        count = min(OPTIONS.num_steps, len(text) - 1 - row)
        expected = reference(text[: row + 2], [*text[row + 2 : row + 1 + count], 0])
        worst = max(worst, float((found[:count, row].double() - expected).abs().max()))
    return worst


# What is trained is what drafts


def test_every_row_and_depth_is_what_drafting_computes_there(training, target):
    assert largest_error(training, target, random_text(12)) < 1e-4


@pytest.mark.parametrize("variant", ["other carry", "other order", "token of the state", "target's other state"])
def test_another_recurrence_would_show(training, target, variant):
    """Negative control."""
    assert largest_error(training, target, random_text(12), variant) > 1e-2


def test_a_row_that_sees_one_row_too_far_would_show(training, target, monkeypatch):
    """Negative control: the target has not been there when the layer drafts."""

    def further(self, columns, depth, states):
        distance = columns[:, None] - columns
        return torch.cat([distance >= -(depth > 0), *[distance == 0] * depth], dim=1)[None, None]

    monkeypatch.setattr(MtpTraining, "_mask", further)
    assert largest_error(training, target, random_text(12)) > 1e-2


def largest_difference_from_drafts(target, training: MtpTraining) -> float:
    """Between what drafts were drawn from in a call and what training computes of the same tokens."""
    drafter = MtpDrafter(training.model, num_draft_tokens=OPTIONS.num_steps).bind(target)
    worst, compared = 0.0, 0
    for texts, _, scores, tokens in rounds_of(drafter, target, prompts([11]), max_new_tokens=16, eos_token_id=None):
        drafted = unrolled_logits(training, batch_of(target, [[*texts[0], *tokens[0].tolist()]], [3]))
        for depth in range(scores.shape[1]):
            worst = max(worst, float((scores[0, depth] - drafted[depth, 0, len(texts[0]) - 2]).abs().max()))
            compared += 1
    assert compared > 12
    return worst


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "gpt2"])
def test_it_is_so_for_every_family_of_targets(name):
    """With sliding windows, scaled embeddings and attention sinks."""
    target = tiny_target(name)
    training = training_of(new_mtp_layer(target, [batch_of(target, [random_text(30)], [3])]), target)
    assert largest_difference_from_drafts(target, training) < 1e-4


def test_a_window_that_training_ignores_would_show(monkeypatch):
    """Negative control."""
    target = tiny_target("mistral")
    training = training_of(new_mtp_layer(target, [batch_of(target, [random_text(30)], [3])]), target)
    kept = training._mask
    monkeypatch.setattr(training, "_mask", lambda *arguments: without_window(training, kept, arguments))
    assert largest_difference_from_drafts(target, training) > 1e-2


def without_window(training: MtpTraining, mask, arguments) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training.model, "window", lambda index: None)
        return mask(*arguments)


# The loss


def laws_and_guesses(training: MtpTraining, target, text: list[int], prompt_length: int):
    """(depth, the target's law [V], the layer's logits [V], the text's token) of each row that is taught."""
    reference, steps = Reference(llama(), target), OPTIONS.num_steps
    with torch.no_grad():
        laws = target(torch.tensor([text])).logits[0].double().softmax(dim=-1)
    for last in range(max(prompt_length, steps), len(text) - 1):  # the token that the target was asked after
        for depth in range(steps):
            logits = reference(text[: last + 1 - depth], [*text[last + 1 - depth : last + 1], 0])[depth]
            yield depth, laws[last], logits, text[last + 1]


def expected_loss(training: MtpTraining, target, texts, prompt_lengths, text_labels: bool = False) -> torch.Tensor:
    losses: list[list[torch.Tensor]] = [[] for _ in range(OPTIONS.num_steps)]
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        for depth, law, logits, token in laws_and_guesses(training, target, text, prompt_length):
            guess = logits.log_softmax(-1)
            losses[depth].append(-guess[token] if text_labels else -(law * guess).sum())
    return sum(torch.stack(one).mean() * OPTIONS.decay**depth for depth, one in enumerate(losses))


TEXTS, PROMPT_LENGTHS = [random_text(14, seed=1), random_text(9, seed=2)], [6, 2]


@pytest.mark.parametrize("text_labels", [False, True])
@pytest.mark.parametrize("mode", ["held out", "in training, all tokens drawn"])
def test_the_loss_is_the_cross_entropy_over_the_whole_vocabulary(training, target, mode, text_labels):
    training.options = dataclasses.replace(OPTIONS, text_labels=text_labels, num_negatives=VOCAB_SIZE)
    training.train(mode != "held out")
    found = training(batch_of(target, TEXTS, PROMPT_LENGTHS)).loss
    expected = expected_loss(training, target, TEXTS, PROMPT_LENGTHS, text_labels)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


def test_sums_over_drawn_tokens_stand_for_those_over_all(training):
    """Were the tokens that are left out not stood for, they would be those of a smaller vocabulary."""
    answers, sums, bare = torch.tensor([95, 3, 60, 95]), [], []
    torch.manual_seed(0)
    for _ in range(400):
        rows, bias, places = part_of_head(training.head, training.frequent, answers, OPTIONS.num_negatives)
        assert len(rows) == OPTIONS.num_frequent + 2 + OPTIONS.num_negatives == len(rows.unique(dim=0))
        assert torch.equal(rows[places], training.head[answers])
        sums.append((bias.exp()[:, None] * rows).sum(dim=0))
        bare.append(rows.sum(dim=0))
    expected = training.head.sum(dim=0)
    error, bare_error = ((torch.stack(one).mean(dim=0) - expected).norm() / expected.norm() for one in (sums, bare))
    assert error < 0.1 < 0.3 < bare_error


def test_hits_are_the_drafts_that_are_right_up_to_a_depth(target, training):
    """Over the whole vocabulary: the frequent tokens here are 0 to 39."""
    reference, generator, steps = Reference(llama(), target), torch.Generator().manual_seed(3), OPTIONS.num_steps
    text = random_text(6)
    while len(text) < 26:
        for _ in range(3):
            text.append(int(reference(text, [0])[0].argmax()))
        text.append(int(torch.randint(3, VOCAB_SIZE, (1,), generator=generator)))
    hits, rows = [0] * steps, [0] * steps
    for root in range(7, len(text)):  # a draft goes on from text[:root]
        count = min(steps, len(text) - root)
        guesses = reference(text[:root], [*text[root : root + count - 1], 0]).argmax(dim=-1).tolist()
        for depth in range(count):
            rows[depth] += 1
            hits[depth] += guesses[: depth + 1] == text[root : root + depth + 1]
    assert max(text[7:]) >= OPTIONS.num_frequent
    scores = training(batch_of(target, [text], [6]))
    assert scores.num_hits.tolist() == hits and scores.num_rows.tolist() == rows
    assert rows[0] > hits[0] > hits[1] > 0, "drafts should be right in part"


def test_padding_changes_nothing(training, target):
    together = batch_of(target, TEXTS, PROMPT_LENGTHS, width=31, junk=50)
    alone = [training(batch_of(target, [text], [n])) for text, n in zip(TEXTS, PROMPT_LENGTHS, strict=True)]
    scores = training(together)
    assert torch.equal(scores.num_hits, alone[0].num_hits + alone[1].num_hits)
    assert torch.equal(scores.num_rows, alone[0].num_rows + alone[1].num_rows)
    taught = [len(text) - 1 - max(n, OPTIONS.num_steps) for text, n in zip(TEXTS, PROMPT_LENGTHS, strict=True)]
    expected = (taught[0] * alone[0].loss + taught[1] * alone[1].loss) / sum(taught)
    torch.testing.assert_close(scores.loss, expected, atol=1e-5, rtol=0)


def test_a_batch_that_teaches_nothing_costs_nothing(training, target):
    scores = training.train()(batch_of(target, [random_text(OPTIONS.num_steps)], [1]))
    assert scores.loss.item() == 0 and scores.num_rows.tolist() == [0] * OPTIONS.num_steps
    scores.loss.backward()
    assert all(parameter.grad is not None for parameter in training.parameters()), "every process must have gradients"


def test_the_layer_learns_and_the_target_stays(training, target):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    assert {id(p) for p in training.parameters()} == {id(p) for p in training.model.parameters()}
    training.train()(batch_of(target, TEXTS, PROMPT_LENGTHS)).loss.backward()
    for name, parameter in training.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters())
    torch.optim.SGD(training.parameters(), lr=1.0).step()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_states_and_target_may_be_of_another_precision_than_the_layer(training, target):
    batch = batch_of(target, TEXTS, PROMPT_LENGTHS)
    exact = training(batch).loss.item()
    batch.states = batch.states.bfloat16()
    rounded = training_of(training.model, copy.deepcopy(target).bfloat16())
    assert rounded(batch).loss.item() == pytest.approx(exact, rel=0.02)


# Where it starts


def projection_error(target, layer, batch: Batch) -> float:
    """Mean square of what the target's last layer reads and the projection does not give, as a share."""
    with torch.no_grad():
        read = target(batch.ids, output_hidden_states=True).hidden_states[-2][0, 1:]
        embedded = layer.embedding_norm(target.get_input_embeddings()(batch.ids[0, 1:]))
        given = layer.projection(torch.cat([embedded, layer.hidden_norm(batch.states[0, :-1, 0])], dim=-1))
    return float((given - read).square().mean() / read.square().mean())


def test_a_new_layer_starts_near_the_target():
    """On a text that it was not fitted to, of a target whose layers add little to the embedding."""
    target = copy.deepcopy(tiny_target())
    with torch.no_grad():
        for layer in target.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    layer = new_mtp_layer(target, [batch_of(target, [random_text(40, seed=s)], [3]) for s in range(3, 20)]).layers[0]
    block, last = layer.blocks[0].state_dict(), target.get_decoder().layers[-1].state_dict()
    assert all(torch.equal(weight, last[name]) for name, weight in block.items())
    assert torch.equal(layer.final_norm.weight, target.get_decoder().norm.weight)
    held_out = batch_of(target, [random_text(40, seed=99)], [3])
    assert projection_error(target, layer, held_out) < 0.1
    torch.nn.init.normal_(layer.projection.weight, std=layer.projection.weight.std().item())
    assert projection_error(target, layer, held_out) > 0.5


def test_a_target_whose_last_layer_is_not_found_is_refused():
    check_attends(tiny_target("llama"))
    with pytest.raises(ValueError, match="target: the last layer of GPT2LMHeadModel is no attention layer"):
        check_attends(tiny_target("gpt2"))


def test_a_layer_that_learnt_is_read_back_and_drafts(tmp_path, target):
    """On the text that it was taught; it starts with hardly a draft right."""
    ids = prompts([5], seed=8)["input_ids"]
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
    expected = target.generate(ids, **options)
    batch = batch_of(target, [expected[0].tolist()], [5])
    torch.manual_seed(0)
    training = training_of(new_mtp_layer(target, [batch_of(target, [random_text(40)], [3])]), target).train()
    optimizer = torch.optim.Adam(training.parameters(), lr=1e-2)
    accepted = []
    for steps in (0, 40):
        for _ in range(steps):
            optimizer.zero_grad()
            training(batch).loss.backward()
            optimizer.step()
        save_mtp(tmp_path / str(steps), training.model, dtype=torch.float32)
        drafter = AutoDrafter.from_pretrained(tmp_path / str(steps), target=target, num_draft_tokens=3)
        assert torch.equal(target.generate(ids, **options, assistant_model=drafter), expected)
        accepted.append(drafter.last_stats.mean_accepted_length)
    assert accepted[0] < 1.5 and accepted[1] > 2.5
