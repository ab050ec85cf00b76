"""A Gemma 4 assistant drafts what its formulas say, after every rejection, in every row; the text is the target's."""

import copy
import functools

import pytest
import torch
from devices import SimulatedDevices, put
from gemma4_formats import LAYOUTS, SHARED, VOCAB, F, S, assistant_of, tiny_gemma4, write_assistant
from gemma4_reference import Reference
from test_greedy import plain, speculative
from test_split_targets import THIRD, on_first, split_target
from tiny import prompts
from transformers import DynamicCache
from watched import largest_error, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.auto import drafter_of_model
from hf_specdec.drafters.gemma4 import Gemma4Drafter
from hf_specdec.drafters.gemma4.session import Gemma4Session

BATCHES = {"one row": [17], "ragged batch": [17, 9, 3]}
OPTIONS = {"max_new_tokens": 24, "eos_token_id": None}


def load(folder, layout: str, **options) -> Gemma4Drafter:
    path = write_assistant(folder / layout, assistant_of(layout))
    return AutoDrafter.from_pretrained(path, target=tiny_gemma4(layout), **options)


def inputs_of(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    return prompts(lengths, seed=seed, vocab_size=VOCAB)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, layout, batch):
    target, drafter = tiny_gemma4(layout), load(tmp_path, layout, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, inputs_of(BATCHES[batch]), **OPTIONS)
    assert largest_error(rounds, Reference(assistant_of(layout), target)) < 1e-4
    assert drafter.last_stats.cache == "ragged"
    assert 0.2 < drafter.last_stats.acceptance_rate < 0.8, "drafts should be accepted in part"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_is_that_of_plain_generate_at_every_draft_length(tmp_path, layout):
    target, drafter = tiny_gemma4(layout), load(tmp_path, layout)
    inputs = inputs_of(BATCHES["ragged batch"])
    expected = plain(target, inputs, **OPTIONS)
    assert len(set(expected[0, 17:].tolist())) > 5, "a text that repeats itself tests little"
    for k in (1, 2, 3, 5, 8):
        rounds = rounds_of(drafter, target, inputs, num_assistant_tokens=k, **OPTIONS)
        lengths = [tokens.shape[1] for *_, tokens in rounds]
        assert max(lengths) == k and lengths.count(k) >= 4
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        assert torch.equal(speculative(target, one, drafter, num_assistant_tokens=k, **OPTIONS), expected[:1])


@functools.cache
def rounds_for_mistakes(layout: str) -> list:
    drafter = drafter_of_model(assistant_of(layout), tiny_gemma4(layout))
    return rounds_of(drafter, tiny_gemma4(layout), inputs_of([17]), num_assistant_tokens=3, **OPTIONS)


MISTAKES = {
    "state first": "31B",
    "embedding as it is stored": "31B",
    "state of the token before": "31B",
    "state before the norm": "31B",
    "carry before the norm": "31B",
    "carry of the target": "31B",
    "first token again": "31B",
    "a position that advances": "31B",
    "first layers of their kinds": "31B",
    "another sliding layer": "26B-A4B",
    "no window": "12B",
    "a wider window": "12B",
    "a narrower window": "12B",
    "a rejected token's keys": "31B",
    "the other kind's rotation": "31B",
    "every pair turns": "31B",
    "scaled scores": "31B",
    "no layer scalar": "31B",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_show(mistake):
    """Negative control of the test above it."""
    layout = MISTAKES[mistake]
    rounds = rounds_for_mistakes(layout)
    assert largest_error(rounds, Reference(assistant_of(layout), tiny_gemma4(layout))) < 1e-4
    assert largest_error(rounds, Reference(assistant_of(layout), tiny_gemma4(layout), variant=mistake)) > 1e-2


def test_the_centroid_head_scores_the_tokens_of_the_best_clusters_only():
    rounds, theirs = rounds_for_mistakes("E4B"), assistant_of("E4B").config
    counts = {int(scores[0, i].isfinite().sum()) for *_, scores, _ in rounds for i in range(scores.shape[1])}
    assert counts == {theirs.centroid_intermediate_top_k * VOCAB // theirs.num_centroids}
    with pytest.raises(AssertionError):
        largest_error(rounds, Reference(assistant_of("E4B"), tiny_gemma4("E4B"), variant="all clusters"))


def test_the_centroid_head_does_not_wait_for_the_device():
    """Tensors without values can be read by nobody; transformers reads the least score to fill the others."""
    theirs = assistant_of("E4B")
    ours = drafter_of_model(theirs, tiny_gemma4("E4B")).model.masked_embedding
    states, head = torch.empty(2, 1, 32, device="meta"), torch.empty(VOCAB, 32, device="meta")
    assert copy.deepcopy(ours).to("meta")(states, head).shape == (2, 1, VOCAB)
    with pytest.raises(RuntimeError, match="item"):
        copy.deepcopy(theirs.masked_embedding).to("meta")(states, head)


@pytest.mark.parametrize(("draft_position", "offset"), [("last_token", 0), ("token_before", -1)])
def test_queries_stand_where_the_option_says(tmp_path, draft_position, offset):
    target, drafter = tiny_gemma4("31B"), load(tmp_path, "31B", draft_position=draft_position, num_draft_tokens=3)
    rounds = rounds_of(drafter, target, inputs_of([17, 6]), **OPTIONS)
    assert largest_error(rounds, Reference(assistant_of("31B"), target, position=offset)) < 1e-4
    assert largest_error(rounds, Reference(assistant_of("31B"), target, position=-1 - offset)) > 1e-2
    default = load(tmp_path, "31B")
    assert default.draft_position == "last_token"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_draft_is_that_of_transformers(tmp_path, layout):
    """Over a prompt within the window; beyond it, transformers' mask shows two more tokens of it."""
    target, theirs, prompt = tiny_gemma4(layout), assistant_of(layout), inputs_of([7])
    rounds = rounds_of(load(tmp_path, layout, num_draft_tokens=3), target, prompt, alter=False, **OPTIONS)
    (text,), _, scores, tokens = rounds[0]
    ids = torch.tensor([text])
    with torch.no_grad():
        output = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        state, token = output.hidden_states[-1][:, -1:], ids[:, -1:]
        for slot in range(3):
            found = theirs(
                inputs_embeds=torch.cat([target.get_input_embeddings()(token), state], dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                attention_mask=torch.ones_like(ids),
                shared_kv_states=dict(output.shared_kv_states),
            )
            state, token = found.last_hidden_state, found.logits.argmax(dim=-1)
            scored = scores[0, slot].isfinite()
            torch.testing.assert_close(scores[0, slot, scored], found.logits[0, 0, scored], atol=1e-4, rtol=1e-4)
            assert int(token) == int(tokens[0, slot])


def test_drafts_after_a_rejection_are_those_of_a_fresh_call(tmp_path):
    target, drafter = tiny_gemma4("31B"), load(tmp_path, "31B", num_draft_tokens=3)
    rounds = rounds_of(drafter, target, inputs_of([17]), **OPTIONS)
    assert drafter.last_stats.num_accepted < drafter.last_stats.num_drafted
    for (text,), _, scores, _ in rounds[1:8]:
        fresh = {
            "input_ids": torch.tensor([text[:-1]]),
            "attention_mask": torch.ones(1, len(text) - 1, dtype=torch.long),
        }
        first = rounds_of(drafter, target, fresh, alter=False, max_new_tokens=8, eos_token_id=None)[0]
        assert first[0][0] == text
        torch.testing.assert_close(scores[:, 0], first[2][:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["E2B", "31B"])
@pytest.mark.parametrize("perturbed", [S, F])
def test_layers_read_the_targets_layer_of_their_own_kind(tmp_path, layout, perturbed):
    """vllm-ascend issue 16980: layers of every kind that read the first kind's keys draft nothing that is accepted."""
    drafter, outputs = load(tmp_path, layout, num_draft_tokens=1), []

    class Watching(Gemma4Session):
        def _views(self, here):
            views = super()._views(here)
            for kind, view in views.items():
                storages = [x.untyped_storage().data_ptr() for x in (view.keys, self.shared.layers[kind].keys)]
                assert storages[0] == storages[1], "the target's cache should not be copied"
            before = self.attended(here)
            for x in self.shared.layers[perturbed][:2]:
                x.add_(1.0)
            outputs.append((before, self.attended(here)))
            for x in self.shared.layers[perturbed][:2]:
                x.sub_(1.0)
            return views

        def attended(self, here):
            views, generator = super()._views(here), torch.Generator().manual_seed(0)
            states = torch.randn(1, 1, self.config.hidden_size, generator=generator)
            kinds = zip(self.config.kinds, self.model.layers, strict=True)
            return [(kind, layer.self_attn(states, views[kind])) for kind, layer in kinds]

    drafter.start = lambda request: Watching(drafter, request)
    speculative(tiny_gemma4(layout), inputs_of([11]), drafter, max_new_tokens=6, eos_token_id=None)
    assert len(outputs) >= 3
    for before, after in outputs:
        for (kind, one), (_, other) in zip(before, after, strict=True):
            assert torch.equal(one, other) == (kind != perturbed)


@pytest.mark.parametrize("layout", ["E2B", "31B"])
def test_rows_that_have_finished_leave_the_others_as_they_are(tmp_path, layout):
    target, drafter = tiny_gemma4(layout), load(tmp_path, layout, num_draft_tokens=3)
    inputs = inputs_of([17, 9, 3, 12])
    free = plain(target, inputs, **OPTIONS)[:, 17:]
    stops = [int(free[0, 3]), int(free[2, 6])]
    rounds = rounds_of(drafter, target, inputs, **{**OPTIONS, "eos_token_id": stops})
    assert sum(sum(finished) >= 2 for _, finished, *_ in rounds) >= 3, "rows should end apart"
    assert largest_error(rounds, Reference(assistant_of(layout), target)) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_targets_own_cache_serves_as_well(tmp_path, layout, monkeypatch):
    """Its sliding layers hold little more than their windows."""
    target, drafter = tiny_gemma4(layout), load(tmp_path, layout, num_draft_tokens=3)
    monkeypatch.setattr("hf_specdec.integration.paths.why_not_ragged", lambda model: "of this test")
    rounds = rounds_of(drafter, target, inputs_of([17]), **OPTIONS)
    assert (drafter.last_stats.cache, drafter.last_stats.rollback) == ("own", "crop")
    assert largest_error(rounds, Reference(assistant_of(layout), target)) < 1e-4
    inputs = inputs_of([17, 4])
    assert torch.equal(speculative(target, inputs, drafter, **OPTIONS), plain(target, inputs, **OPTIONS))


@pytest.mark.parametrize("given", ["the whole text", "the new tokens"])
def test_a_second_turn_drafts_from_the_whole_text(tmp_path, given):
    target, drafter = tiny_gemma4("31B"), load(tmp_path, "31B", num_draft_tokens=3)
    cache, inputs, reference = DynamicCache(config=target.config), inputs_of([14, 6], seed=4), None
    ids = plain(target, inputs, **OPTIONS, cache=cache)
    ids = torch.cat([ids, inputs_of([5, 5], seed=9)["input_ids"]], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 14), value=1)
    earlier = cache.get_seq_length() if given == "the new tokens" else 0
    before = [row[:earlier][keep[:earlier].bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    expected = plain(target, {"input_ids": ids, "attention_mask": mask}, **OPTIONS)
    rounds: list = []

    class Watching(Gemma4Session):
        def propose(self, budget, verification):
            self.scores = []
            draft = super().propose(budget, verification)
            rounds.append(([list(text) for text in self.rows.texts], torch.cat(self.scores, dim=1), draft.tokens))
            return draft

        def _scores(self, *args):
            self.scores.append(super()._scores(*args))
            return self.scores[-1].clone()

    drafter.start = lambda request: Watching(drafter, request)
    now = {"input_ids": ids[:, earlier:], "attention_mask": mask}
    found = speculative(target, now, drafter, cache=cache, **OPTIONS)
    assert torch.equal(found, expected[:, earlier:])
    reference = Reference(assistant_of("31B"), target)
    assert len(rounds) > 5
    for texts, scores, tokens in rounds[:6]:
        for row, text in enumerate(texts):
            drafted = tokens[row].tolist()
            error = (reference(before[row] + text, drafted) - scores[row].double()).abs().max()
            assert float(error) < 1e-4


def test_a_prompt_in_chunks_and_a_drafter_of_another_dtype(tmp_path):
    target, inputs = tiny_gemma4("E2B"), inputs_of([17, 9, 3])
    expected = plain(target, inputs, **OPTIONS)
    drafter = load(tmp_path, "E2B", num_draft_tokens=3)
    assert torch.equal(speculative(target, inputs, drafter, prefill_chunk_size=5, **OPTIONS), expected)
    low = load(tmp_path, "E2B", num_draft_tokens=3, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert torch.equal(speculative(target, inputs, low, **OPTIONS), expected)


@pytest.mark.parametrize("layout", ["E4B", "31B"])
def test_target_and_drafter_may_be_on_several_devices(layout):
    """The devices are simulated: see `devices`."""
    base, inputs = tiny_gemma4(layout), inputs_of([17, 9, 3])
    free = plain(base, inputs, **OPTIONS)[:, 17:]
    options = {**OPTIONS, "eos_token_id": [int(free[0, 5]), int(free[2, 9])]}  # rows end apart
    expected = plain(base, inputs, **options)
    model = split_target(base)
    drafter = put(drafter_of_model(copy.deepcopy(assistant_of(layout)), base), THIRD).bind(model)
    with SimulatedDevices() as devices:
        found = speculative(model, on_first(inputs), drafter, **options)
    assert torch.equal(found, expected)
    assert devices.copies > 0 and drafter.last_stats.num_drafted > 0


def test_every_layout_names_the_layers_that_transformers_shares():
    for layout in LAYOUTS:
        modes = tiny_gemma4(layout).config.kv_sharing_modes
        assert {i for i, mode in enumerate(modes) if mode == "store"} == set(SHARED.values())
