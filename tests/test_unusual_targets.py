"""Targets and inputs with ways of their own: exact, or refused with the reason, never silently wrong."""

import pytest
import torch
from scripted import RowScript, ScriptedDrafter
from tiny import EOS, perturbed, prompts, randomise, tiny_config, tiny_target
from tiny_hybrids import tiny_own
from tiny_types import tiny_of_type
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    StoppingCriteria,
)

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

NEW_TOKENS = 30


def build(config):
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed=0)
    return model


def llama(**changes):
    return LlamaConfig(**{**tiny_config("llama").to_dict(), "eos_token_id": None, **changes})


def scripted(model, inputs, expected, **options):
    width = inputs["input_ids"].shape[1]
    right = lambda row, round: (row + 2 * round) % 4  # noqa: E731
    return ScriptedDrafter(expected[:, width:].tolist(), right=right, num_draft_tokens=3, **options).bind(model)


def generate(model, inputs, drafter=None, **options):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
    return model.generate(**inputs, assistant_model=drafter, **options)


def rope(kind):
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters.update(
            short_factor=[1.0] * 8, long_factor=[2.0 + i for i in range(8)], original_max_position_embeddings=24
        )
    return parameters


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_length_are_served_up_to_where_they_change(kind):
    model = build(llama(max_position_embeddings=24 if kind == "dynamic" else 96, rope_parameters=rope(kind)))
    inputs = prompts([9])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1, num_draft_tokens=3)
    with pytest.raises(ValueError, match=f"served up to 21 tokens, because its '{kind}' rotary embedding changes"):
        generate(model, inputs, drafter)
    expected = generate(model, inputs, max_new_tokens=12)
    assert torch.equal(generate(model, inputs, drafter, max_new_tokens=12), expected)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_other_rotary_embeddings_are_served_at_any_length(kind):
    parameters = {**rope(kind), "original_max_position_embeddings": 24}
    if kind == "llama3":
        parameters.update(low_freq_factor=1.0, high_freq_factor=4.0)
    model = build(llama(max_position_embeddings=96, rope_parameters=parameters))
    inputs = prompts([9, 4])
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, scripted(model, inputs, expected)), expected)


def test_an_attention_that_drops_tokens_is_served_up_to_where_it_does():
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build(DogeConfig(vocab_size=97, num_key_value_heads=2, keep_window_size=8, eos_token_id=None, **shape))
    drafter = AutoDrafter.for_target(model, "lookup", num_draft_tokens=1)
    with pytest.raises(ValueError, match="up to 7 tokens, because its attention drops tokens"):
        generate(model, prompts([5]), drafter)


def served_by_rows(model, inputs):
    """Whether the text is plain generate's, row by row over the model's own cache."""
    expected = generate(model, inputs, eos_token_id=None)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    same = torch.equal(generate(model, inputs, drafter, eos_token_id=None), expected)
    return same and drafter.last_stats.cache == "own"


def test_models_whose_code_wants_rows_of_one_length_are_served_row_by_row():
    kinds = {"attention_types": [[["global"], 2]]}
    model = build(GPTNeoConfig(vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, pad_token_id=0, **kinds))
    assert served_by_rows(model, prompts([9, 5]))


def test_a_model_that_fails_on_explicit_masks_is_served_row_by_row():
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build(FalconConfig(vocab_size=97, alibi=True, pad_token_id=0, **shape))
    assert served_by_rows(model, prompts([9, 5]))


def with_own_preparation(change):
    """A target whose preparation of the inputs is changed."""
    model = perturbed(tiny_target("llama"), 0.0)
    original = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(input_ids, **kwargs):
        prepared = original(input_ids, **kwargs)
        change(prepared, kwargs)
        return prepared

    model.prepare_inputs_for_generation = prepare_inputs_for_generation
    return model


def test_positions_that_a_model_shifts_while_preparing_are_followed():
    def shift(prepared, kwargs):
        prepared["position_ids"] = prepared["position_ids"] + 1

    model, inputs = with_own_preparation(shift), prompts([9])
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, scripted(model, inputs, expected)), expected)


def jump_after_the_prefill(prepared, kwargs):
    if not kwargs.get("is_first_iteration"):
        prepared["position_ids"] = prepared["position_ids"] + 1


@pytest.mark.filterwarnings("ignore:.*generates without drafts")
@pytest.mark.parametrize(
    ("change", "rollback"),
    [
        (lambda prepared, kwargs: prepared.update(position_ids=None), "crop"),
        (jump_after_the_prefill, "crop"),
        (lambda prepared, kwargs: prepared.update(cache=None), "stepwise"),
        (lambda prepared, kwargs: prepared.update(visual_pos_masks=torch.zeros(1, 1)), "crop"),
    ],
    ids=["no positions", "positions that jump", "no cache", "a tensor at every step"],
)
def test_what_a_model_does_at_every_step_on_its_own_is_followed(change, rollback):
    model, inputs = with_own_preparation(change), prompts([9])
    expected = generate(model, inputs)
    drafter = scripted(model, inputs, expected)
    assert torch.equal(generate(model, inputs, drafter), expected)
    assert (drafter.last_stats.cache, drafter.last_stats.rollback) == ("own", rollback)


def gpt2(positions):
    special = {"bos_token_id": 1, "eos_token_id": None}
    return build(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=positions, **special))


class StopAt(StoppingCriteria):
    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.width)


def test_drafts_end_at_the_targets_last_position():
    model, inputs = gpt2(24), prompts([9])
    options = {"max_new_tokens": 100, "stopping_criteria": [StopAt(24)]}
    expected = generate(model, inputs, **options)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), num_draft_tokens=6).bind(model)
    assert torch.equal(generate(model, inputs, drafter, **options), expected)


@pytest.mark.parametrize("lengths", [[9], [9, 3, 6]], ids=["one row", "batch"])
def test_a_draft_model_with_fewer_positions_than_the_text_stops_drafting_there(lengths):
    model, inputs = build(llama()), prompts(lengths)
    expected = generate(model, inputs)
    drafter = DraftModelDrafter(gpt2(20), num_draft_tokens=4).bind(model)
    assert torch.equal(generate(model, inputs, drafter), expected)
    assert 0 < drafter.last_stats.num_drafted < 4 * drafter.last_stats.num_verifications


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection", "block"])
def test_processors_may_forbid_every_token_of_a_smaller_draft_vocabulary(rule):
    model, inputs = build(llama()), prompts([9, 4])

    def only_the_last_ids(ids, scores):
        return scores.index_fill(1, torch.arange(92), -torch.inf)

    small = build(LlamaConfig(**{**tiny_config("llama", vocab_size=90).to_dict(), "eos_token_id": None}))
    drafter = DraftModelDrafter(small, rule=rule, seed=1, num_draft_tokens=2).bind(model)
    found = generate(model, inputs, drafter, do_sample=True, top_k=0, logits_processor=[only_the_last_ids])
    assert int(found[:, 9:].min()) >= 92
    assert drafter.last_stats.num_accepted == 0 and drafter.last_stats.num_drafted > 0


def test_criteria_are_given_the_scores_that_plain_generate_gives_them():
    model, inputs = tiny_target("llama"), prompts([9])
    seen = []

    class Reads(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append((len(scores), scores[-1].argmax().item()))
            return torch.tensor([len(scores) >= 17])

    options = {"output_scores": True, "return_dict_in_generate": True, "stopping_criteria": [Reads()]}
    expected = generate(model, inputs, **options)
    plain, seen = seen, []
    found = generate(model, inputs, scripted(model, inputs, expected.sequences), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert seen == plain and len(found.scores) == 17


def test_integer_ids_of_any_width():
    model, inputs = tiny_target("llama"), prompts([9, 4])
    narrow = {"input_ids": inputs["input_ids"].int(), "attention_mask": inputs["attention_mask"]}
    expected = generate(model, narrow)
    assert torch.equal(generate(model, narrow, scripted(model, inputs, expected)), expected)


@pytest.mark.parametrize(("name", "keeps_its_cache"), [("llama", True), ("gpt2", False)])
def test_checkpointing_in_training_mode_is_served_where_it_leaves_a_cache(name, keeps_its_cache):
    model, inputs = perturbed(tiny_target(name), 0.0).train(), prompts([9, 4])
    model.activation_checkpointing_enable()
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    if keeps_its_cache:
        assert torch.equal(generate(model, inputs, drafter), generate(model, inputs))
        return
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has left its cache empty.*call model\.eval\(\)"):
        generate(model, inputs, drafter)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masks_of_any_type(dtype):
    model, inputs = tiny_target("gpt2"), prompts([9, 5])
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    drafter = DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model)
    assert torch.equal(generate(model, inputs, drafter), generate(model, inputs))


def test_memory_follows_the_text_and_not_its_limit():
    model, inputs = build(llama()), prompts([9])
    options = {"max_new_tokens": 10**12, "stopping_criteria": [StopAt(20)]}
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(generate(model, inputs, drafter, **options), generate(model, inputs, max_new_tokens=11))


def test_texts_that_outgrow_every_first_allocation():
    model, inputs = build(llama(max_position_embeddings=2048)), prompts([9, 300])
    expected = generate(model, inputs, max_new_tokens=900)
    drafter = ScriptedDrafter(expected[:, 300:].tolist(), right=lambda row, round: 5 + row, num_draft_tokens=9)
    assert torch.equal(generate(model, inputs, drafter.bind(model), max_new_tokens=900), expected)


def test_a_compiled_target_is_known_by_what_was_compiled():
    model, inputs = perturbed(tiny_target("llama"), 0.0), prompts([9])
    compiled = torch.compile(model, backend="eager")
    drafter = AutoDrafter.for_target(compiled, "lookup", min_ngram=1)
    assert torch.equal(generate(compiled, inputs, drafter), generate(model, inputs))


def test_the_prompts_special_tokens_are_no_stop():
    model = tiny_target("llama")
    inputs = prompts([9, 4])
    inputs["input_ids"][:, -2] = EOS
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, scripted(model, inputs, expected)), expected)


def test_models_that_copy_their_cache_layers_are_served():
    from transformers import DoryConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    loops = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
    loops["num_hidden_layers"] = 4
    model = build(DoryConfig(vocab_size=97, head_dim=16, eos_token_id=None, **shape, **loops))
    inputs = prompts([9, 4])
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, scripted(model, inputs, expected)), expected)


def test_a_model_whose_own_steps_disagree_with_its_whole_texts_is_served_by_its_steps():
    """GIT counts image tokens into the mask of every step, also where there are none."""
    from transformers import GitConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {"image_size": 32, "patch_size": 8}
    model = build(GitConfig(vocab_size=97, vision_config={**shape, **image}, pad_token_id=0, **shape))
    assert served_by_rows(model, prompts([9, 4]))


def test_an_attention_whose_temperature_grows_with_length_is_served_up_to_where_it_does():
    from transformers import Llama4TextConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    tuned = {"attn_temperature_tuning": True, "floor_scale": 24, "attn_scale": 2.0, "no_rope_layers": [1, 0]}
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 512}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    model = build(Llama4TextConfig(vocab_size=97, **shape, **heads, **tuned, **kinds, **special))
    inputs = prompts([9, 4])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1, num_draft_tokens=3)
    with pytest.raises(ValueError, match="served up to 20 tokens, because its attention temperature changes there"):
        generate(model, inputs, drafter)
    expected = generate(model, inputs, max_new_tokens=11)
    assert torch.equal(generate(model, inputs, drafter, max_new_tokens=11), expected)


class Adapted(torch.nn.Module):
    """What PEFT makes of a model: everything but its class is the model's, which generates."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_a_target_with_adapters_is_known_by_the_model_that_generates():
    model, inputs = tiny_target("llama"), prompts([9, 4])
    for target in (Adapted(model), model):
        drafter = AutoDrafter.for_target(target, "lookup", min_ngram=1)
        assert torch.equal(generate(Adapted(model), inputs, drafter), generate(model, inputs))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_the_cache_of_another_are_served(model_type):
    model, inputs = tiny_of_type(model_type), prompts([9, 4])
    expected = generate(model, inputs, eos_token_id=None)
    drafter = scripted(model, inputs, expected)
    assert torch.equal(generate(model, inputs, drafter, eos_token_id=None), expected)
    assert drafter.last_stats.cache == "ragged"


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])  # ragged rows, and row by row
def test_token_types_follow_the_rows(name):
    model = tiny_target("gpt2") if name == "gpt2" else tiny_own("gpt_neo")
    inputs = prompts([9, 4, 6])
    types = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))  # they are embedded as ids are
    free = generate(model, inputs, token_type_ids=types, eos_token_id=None)
    assert not torch.equal(free, generate(model, inputs, eos_token_id=None)), "they should matter"
    options = {"token_type_ids": types, "eos_token_id": [int(free[0, 12]), int(free[1, 20])]}  # rows end apart
    expected = generate(model, inputs, **options)
    texts = expected[:, 9:].tolist()
    for drafter in (
        AutoDrafter.for_target(model, "lookup", min_ngram=1),
        RowScript(texts, right=lambda row, round: (row + 2 * round) % 4, num_draft_tokens=3).bind(model),
    ):
        assert torch.equal(generate(model, inputs, drafter, **options), expected), drafter.method
