"""Training a diffusion drafter: what is trained is what drafts, and loss and hits are those of their definitions."""

import copy
import dataclasses

import pytest
import torch
from diffusion_formats import MASK
from diffusion_rounds import passes_of
from test_greedy import plain, speculative
from test_training_mtp import batch_of, random_text
from tiny import VOCAB_SIZE, prompts, randomise, tiny_config, tiny_target
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_specdec import AutoDrafter
from hf_specdec.export.diffusion import save_diffusion
from hf_specdec.training.batches import Batch
from hf_specdec.training.diffusion import DiffusionOptions, DiffusionTraining, MaskedBlocks, check_layers, new_layers

SIZE = 4
OPTIONS = DiffusionOptions(
    block_size=SIZE, num_layers=2, mask_token_id=MASK, num_copies=2, decay=2.0, num_frequent=40, num_negatives=20
)
FAMILIES = ("llama", "qwen2", "qwen3")
TEXTS, PROMPT_LENGTHS = [random_text(15, seed=1), random_text(10, seed=2)], [5, 2]


def target_of(name: str):
    """A random target; Qwen2's has biases that are not zero."""
    if name != "qwen2":
        return tiny_target(name)
    shape = {key: getattr(tiny_config("llama"), key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = Qwen2Config(**shape, **heads, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def training_of(target, options: DiffusionOptions = OPTIONS) -> DiffusionTraining:
    return DiffusionTraining(
        new_layers(target, options.num_layers), target, torch.arange(options.num_frequent), options
    ).eval()


def reference(training: DiffusionTraining, target, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits of one forward over a canvas, by the whole model that the layers stand for."""
    model = type(target)(training.model.config).float().eval()
    weights = {f"model.{name}": weight for name, weight in training.model.state_dict().items()}
    head = target.get_output_embeddings().weight
    weights |= {"model.embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": head}
    model.load_state_dict(weights)
    blocks = torch.arange(len(tokens)) // training.options.block_size
    hidden = blocks[None] > blocks[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask).logits[0]


def canvas(text: list[int], first: int) -> list[int]:
    """The text up to `first`, then masks to the end of its block."""
    return [*text[:first], *[MASK] * (-(-(first + 1) // SIZE) * SIZE - first)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    target = target_of(request.param)
    return target, training_of(target)


# What is trained is what drafts


def logits_in_training(training: DiffusionTraining, target, text: list[int], slots: list[int]) -> torch.Tensor:
    """[block_size, V] of the block behind `text`'s complete ones; its tokens are the text's, then `slots`."""
    begin = len(text) // SIZE * SIZE
    columns = torch.arange(begin, begin + SIZE)[None, None, None]
    there = [*text, *slots, *[MASK] * (SIZE - (len(text) - begin) - len(slots))]
    masked = torch.tensor(there[begin:])[None, None, None] == MASK
    batch = batch_of(target, [[*text, *slots, 0]], [1])
    states = training.states(batch, MaskedBlocks(columns, columns - len(text), masked))
    return (states @ target.get_output_embeddings().weight.T)[0, 0, 0].detach()


def largest_difference(tmp_path, family, **options) -> float:
    """Between what drafts are drawn from and what training computes of the same canvases, wherever in a block the text
    ends, for slots of the block and of the one behind it."""
    target, training = family
    save_diffusion(tmp_path, training.model, SIZE, MASK, torch.float32)
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target, num_draft_tokens=5, **options)
    worst, compared, places = 0.0, 0, set()
    for one in passes_of(drafter, target, prompts([9, 6]), max_new_tokens=24, eos_token_id=None):
        for text, slots, logits, done in zip(one.texts, one.canvas.tolist(), one.logits, one.finished, strict=True):
            while slots and not done:
                here = SIZE - len(text) % SIZE
                found = logits_in_training(training, target, text, slots[:here])[len(text) % SIZE :][: len(slots)]
                apart = (found - logits[:here]).abs()
                apart[:, MASK] = 0  # barred in drafts
                worst, compared, places = max(worst, float(apart.max())), compared + 1, places | {len(text) % SIZE}
                if MASK in slots[:here]:
                    break
                text, slots, logits = [*text, *slots[:here]], slots[here:], logits[here:]
    assert compared > 20 and places == set(range(SIZE))
    return worst


@pytest.mark.parametrize("effort", [1, 2])
def test_a_block_is_trained_as_it_is_drafted(tmp_path, family, effort):
    assert largest_difference(tmp_path, family, effort=effort) < 1e-4


@pytest.mark.parametrize("block_size", [SIZE + 1, 2 * SIZE])
def test_blocks_that_are_drafted_otherwise_would_show(tmp_path, family, block_size):
    """Negative control."""
    assert largest_difference(tmp_path, family, block_size=block_size) > 1e-2


def test_the_cache_of_complete_blocks_is_exact(tmp_path, family):
    target, training = family
    save_diffusion(tmp_path, training.model, SIZE, MASK, torch.float32)
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target, num_draft_tokens=3)
    for one in passes_of(drafter, target, prompts([11, 4]), max_new_tokens=16, eos_token_id=None):
        for text, slots, logits, done in zip(one.texts, one.canvas.tolist(), one.logits, one.finished, strict=True):
            if not done:
                there = [*text, *slots]
                masks = [MASK] * (-len(there) % SIZE)
                expected = reference(training, target, [*there, *masks])[len(text) : len(there)]
                expected[:, MASK] = -torch.inf
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# The loss


def taught(training: DiffusionTraining, target, texts, prompt_lengths):
    """(slot, the target's law, the drafter's logits, the text's token) of every mask of a held-out look, by text."""
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        with torch.no_grad():
            laws = target(torch.tensor([text])).logits[0].double().softmax(dim=-1)
        for number in range((prompt_length + 1) // SIZE, (len(text) - 1) // SIZE + 1):
            for place in ((number + shift) % SIZE for shift in (0, SIZE // 2)):
                first = max(number * SIZE + place, prompt_length + 1)
                if first // SIZE > number:
                    continue
                logits = reference(training, target, canvas(text, first))
                for column in range(first, min((number + 1) * SIZE, len(text))):
                    yield column - first, laws[column - 1], logits[column].double(), text[column]


@pytest.mark.parametrize("mode", ["held out", "in training, all tokens drawn"])
def test_the_loss_is_the_cross_entropy_with_the_targets_law_over_the_whole_vocabulary(monkeypatch, family, mode):
    target, _ = family
    training = training_of(target, dataclasses.replace(OPTIONS, num_negatives=VOCAB_SIZE))
    batch = batch_of(target, TEXTS, PROMPT_LENGTHS)
    fixed = training.blocks(batch)
    monkeypatch.setattr(training, "blocks", lambda batch: fixed)
    scores = training.train(mode != "held out")(batch)
    losses, weights = [], []
    for slot, law, logits, _ in taught(training, target, TEXTS, PROMPT_LENGTHS):
        losses.append(-(law * logits.log_softmax(-1)).sum())
        weights.append(2.718281828459045 ** (-slot / OPTIONS.decay))
    expected = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    torch.testing.assert_close(scores.loss.double(), expected, atol=1e-4, rtol=0)


def test_hits_are_the_drafts_that_are_right_up_to_a_slot(family):
    target, training = family
    text, generator = random_text(6), torch.Generator().manual_seed(3)
    while len(text) < 40:
        for token in reference(training, target, canvas(text, len(text)))[len(text) :][:2].argmax(dim=-1).tolist():
            text.append(token)
        text.append(int(torch.randint(6, VOCAB_SIZE, (1,), generator=generator)))
    hits, rows, right = [0] * SIZE, [0] * SIZE, True
    for slot, _, logits, token in taught(training, target, [text], [5]):
        right = (right or slot == 0) and int(logits.argmax()) == token
        rows[slot] += 1
        hits[slot] += right
    scores = training(batch_of(target, [text], [5]))
    assert scores.num_hits.tolist() == hits and scores.num_rows.tolist() == rows
    assert rows[0] > hits[0] > 0 and hits[1] > 0, "drafts should be right in part"


def test_first_masks_stand_everywhere_in_training_and_still_in_a_held_out_look():
    target, batch = tiny_target(), batch_of(tiny_target(), [random_text(40)], [3])
    training = training_of(target)
    first = {tuple(training.blocks(batch).slots[0, :, 1:, 0].flatten().tolist()) for _ in range(4)}
    assert len(first) == 1 and {-slot for slot in first.pop()} == set(range(SIZE))
    training.train()
    drawn = torch.stack([-training.blocks(batch).slots[0, :, 1:, 0] for _ in range(200)]).float()
    assert set(drawn.unique().tolist()) == set(range(SIZE))
    assert (drawn.mean(dim=0) - (SIZE - 1) / 2).abs().max() < 0.4


def test_what_no_draft_holds_is_never_shown(family):
    """Prompts are not masked, nor the answer's first token; beyond the text there are masks only."""
    target, _ = family
    for revealed in (0.0, 1.0):
        training = training_of(target, dataclasses.replace(OPTIONS, revealed=revealed)).train()
        batch = batch_of(target, TEXTS, PROMPT_LENGTHS)
        shown = 0
        for _ in range(50):
            blocks = training.blocks(batch)
            assert blocks.columns[blocks.masked].min() > min(PROMPT_LENGTHS)
            for row, (text, prompt_length) in enumerate(zip(TEXTS, PROMPT_LENGTHS, strict=True)):
                columns, masked, slots = blocks.columns[row], blocks.masked[row], blocks.slots[row]
                assert not masked[columns <= prompt_length].any()
                assert masked[(columns >= len(text)) & (slots >= 0)].all()
                shown += int((~masked & (slots >= 0)).sum())
        assert (shown > 0) == (revealed > 0)


def test_padding_changes_nothing(family):
    target, training = family
    alone = [training(batch_of(target, [text], [n])) for text, n in zip(TEXTS, PROMPT_LENGTHS, strict=True)]
    scores = training(batch_of(target, TEXTS, PROMPT_LENGTHS, width=31, junk=50))
    assert torch.equal(scores.num_hits, alone[0].num_hits + alone[1].num_hits)
    assert torch.equal(scores.num_rows, alone[0].num_rows + alone[1].num_rows)
    weights = [
        sum(2.718281828459045 ** (-slot / OPTIONS.decay) for slot, *_ in taught(training, target, [text], [n]))
        for text, n in zip(TEXTS, PROMPT_LENGTHS, strict=True)
    ]
    expected = sum(w * one.loss for w, one in zip(weights, alone, strict=True)) / sum(weights)
    torch.testing.assert_close(scores.loss, expected, atol=1e-4, rtol=0)


def test_a_batch_that_teaches_nothing_costs_nothing(family):
    target, _ = family
    training = training_of(target).train()
    scores = training(batch_of(target, [random_text(4)], [3]))
    assert scores.loss.item() == 0 and scores.num_rows.sum() == 0
    scores.loss.backward()
    assert all(parameter.grad is not None for parameter in training.parameters()), "every process must have gradients"


def test_the_layers_learn_and_the_target_stays(family):
    target, _ = family
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    training = training_of(target).train()
    assert {id(p) for p in training.parameters()} == {id(p) for p in training.model.parameters()}
    torch.manual_seed(0)
    training(batch_of(target, TEXTS, PROMPT_LENGTHS)).loss.backward()
    for name, parameter in training.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    torch.optim.SGD(training.parameters(), lr=1.0).step()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_states_and_target_may_be_of_another_precision_than_the_layers(family):
    target, training = family
    batch = batch_of(target, TEXTS, PROMPT_LENGTHS)
    exact = training(batch).loss.item()
    batch = Batch(batch.ids, batch.lengths, batch.prompt_lengths, batch.states.bfloat16())
    rounded = DiffusionTraining(
        training.model, copy.deepcopy(target).bfloat16(), torch.arange(OPTIONS.num_frequent), OPTIONS
    )
    assert rounded.eval()(batch).loss.item() == pytest.approx(exact, rel=0.02)


# Where it starts, and what becomes of it


def test_new_layers_are_the_targets_first_ones(family):
    target, _ = family
    model, theirs = new_layers(target, 2), target.get_decoder()
    for ours, source in zip([*model.layers, model.norm], [*theirs.layers[:2], theirs.norm], strict=True):
        assert all(torch.equal(weight, source.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert not any("embed" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="`num_layers` is 4 and the target has 3 layers"):
        new_layers(target, 4)


def test_targets_of_other_kinds_are_refused():
    for name in FAMILIES:
        check_layers(target_of(name))
    for name in ("gemma3", "mistral", "gpt2"):
        with pytest.raises(ValueError, match="a diffusion drafter is made of the layers of llama, qwen2, qwen3"):
            check_layers(tiny_target(name))
    biased = copy.deepcopy(tiny_target())
    biased.config.attention_bias = True
    with pytest.raises(ValueError, match="has biases, which"):
        check_layers(biased)
    slides = copy.deepcopy(tiny_target("qwen3"))
    slides.config.use_sliding_window = True
    with pytest.raises(ValueError, match="has sliding windows, which"):
        check_layers(slides)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"block_size": 0}, "`block_size` is 0; give an integer from 1 on"),
        ({"num_layers": 0}, "`num_layers` is 0"),
        ({"num_copies": 0}, "`num_copies` is 0"),
        ({"revealed": 1.5}, "`revealed` is 1.5; give a share from 0 to 1"),
    ],
)
def test_options_that_are_none(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        DiffusionOptions(**changed)


def test_a_drafter_that_learnt_is_read_back_and_drafts(tmp_path):
    """On the text that it was taught; it starts with hardly a draft right. Greedy text is plain at any effort."""
    target, ids = tiny_target(), prompts([5], seed=8)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = dict(max_new_tokens=24, eos_token_id=None)
    expected = plain(target, inputs, **options)
    batch = batch_of(target, [expected[0].tolist()], [5])
    torch.manual_seed(0)
    training = training_of(target).train()
    optimizer = torch.optim.Adam(training.parameters(), lr=3e-3)
    accepted = []
    for steps in (0, 200):
        for _ in range(steps):
            optimizer.zero_grad()
            training(batch).loss.backward()
            optimizer.step()
        save_diffusion(tmp_path / str(steps), training.model, SIZE, MASK, torch.float32)
        for effort in (1, 2, 4):
            drafter = AutoDrafter.from_pretrained(
                tmp_path / str(steps), target=target, num_draft_tokens=3, effort=effort, governor="off"
            )
            assert torch.equal(speculative(target, inputs, drafter, **options), expected)
            accepted.append(drafter.last_stats.mean_accepted_length)
    assert max(accepted[:3]) < 1.7 and min(accepted[3:]) > 2.3
