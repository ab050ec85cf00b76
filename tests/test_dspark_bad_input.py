"""A DSpark drafter that cannot draft for a target is refused with one sentence, before any forward."""

import copy

import pytest
import torch
from dspark_formats import FORMATS, GEMMA4, random_drafter, write_drafter
from eagle3_formats import write
from test_eagle3_bad_input import refusal
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter

CONFIGS = {
    "an interleaved rotary embedding": (dict(rope_is_neox_style=False), "rope_is_neox_style false"),
    "attention sinks": (dict(attention_sink_bias=True), "attention_sink_bias"),
    "latent attention": (dict(attention_mode="mla"), "attention_mode 'mla'"),
    "windows that name no layers": (dict(use_swa=True, swa_window_size=8), "use_swa"),
    "scaled values": (dict(attention_value_scale=0.5), "attention_value_scale"),
    "log-SNR conditioning": (dict(log_snr_conditioning={"size": 4}), "log_snr_conditioning"),
    "no block size": (dict(block_size=None), "has no block_size"),
    "a block of nothing": (dict(block_size=0), "block_size 0 where a positive integer belongs"),
    "no mask": (dict(mask_token_id=None), "has no mask_token_id"),
    "a negative mask": (dict(mask_token_id=-1), "mask_token_id -1 where an integer from 0 on belongs"),
    "a mask beyond the embedding": (dict(mask_token_id=97), "masks with token 97 and the embedding has 97 rows"),
    "no layer ids": (dict(target_layer_ids=None), "does not say which hidden states"),
    "layer ids in words": (dict(target_layer_ids="1,2"), "a list of integers belongs"),
    "layers that the target lacks": (dict(target_layer_ids=[0, 1, 5]), "the target has 3 layers"),
    "too few layers": (dict(target_layer_ids=[0, 1]), "fc for 192 inputs, and 2 hidden states"),
    "another depth": (dict(num_target_layers=36), "of a target of 36 layers"),
    "another hidden size": (dict(target_hidden_size=128), "fc for 192 inputs"),
    "another vocabulary": (dict(vocab_size=32000), "vocabulary of 32000 and the target's is 97"),
    "an unknown activation": (dict(hidden_act="silly"), "hidden_act 'silly'"),
    "an unknown rotary embedding": (dict(rope_parameters={"rope_type": "spiral"}), "'spiral'"),
    "another rank": (dict(markov_rank=16), "markov_rank is 16 and its markov_head.markov_w1.weight makes it 8"),
    "no rank": (dict(markov_rank=0), "markov_rank is 0"),
    "a negative rank": (dict(markov_rank=-1), "markov_rank -1"),
    "an unknown head": (dict(markov_head_type="lstm"), "markov_head_type is 'lstm' and its tensors make it 'vanilla'"),
    "another head": (dict(markov_head_type="rnn"), "markov_head_type is 'rnn'"),
    "few temperatures": (dict(confidence_temperatures=[1.0]), "1 confidence_temperatures for 5 drafted tokens"),
    "a temperature of 0": (dict(confidence_temperatures=[0.0] * 5), "a list of positive numbers belongs"),
    "a cap of 0": (dict(final_logit_softcapping=0), "final_logit_softcapping 0"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_are_wrong_or_not_served_are_refused(tmp_path, case):
    fields, expected = CONFIGS[case]
    assert expected in refusal(write_drafter(tmp_path, random_drafter(), **fields))


TENSORS = {
    "no fusion of the hidden states": ({"hidden_norm.weight": None}, "lacks the tensors hidden_norm.weight"),
    "no last norm": ({"norm.weight": None}, "lacks the tensors norm.weight"),
    "no projection": ({"layers.1.self_attn.v_proj.weight": None}, "lacks the tensors layers.1.self_attn.v_proj"),
    "no half of the markov head": ({"markov_head.markov_w2.weight": None}, "lacks the tensors markov_head.markov_w2"),
    "no confidence head": ({"confidence_head.proj.weight": None}, "enable_confidence_head is True and lacks"),
    "a narrow confidence head": ({"confidence_head.proj.weight": torch.ones(1, 9)}, "for 9 inputs where 64 or 72"),
    "a markov head of another vocabulary": (
        {"markov_head.markov_w1.weight": torch.ones(50, 8)},
        "markov_w1.weight of shape [50, 8] where [97, 8] is expected",
    ),
    "a surplus tensor": ({"layers.0.g_proj.weight": torch.ones(4)}, "does not call for: layers.0.g_proj.weight"),
    "an output gate": ({"layers.0.self_attn.q_proj.weight": torch.ones(128, 64)}, "attn_output_gate"),
    "sinks": ({"layers.0.self_attn.sinks": torch.ones(4)}, "attention_sink_bias"),
    "latent attention": ({"layers.0.self_attn.kv_a_proj.weight": torch.ones(8, 64)}, "attention_mode 'mla'"),
    "a mask of its own": ({"mask_embedding": torch.ones(64)}, "mask_embedding"),
    "experts": ({"layers.0.mlp.experts.0.w1.weight": torch.ones(8, 64)}, "mixtures of experts"),
    "packed weights": ({"layers.0.mlp.up_proj.weight": torch.ones(80, 32, dtype=torch.uint8)}, "is quantised"),
    "scales": ({"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, "is quantised"),
    "a head of one number": (
        {"lm_head.weight": torch.tensor(1.0)},
        "lm_head.weight of shape [] where a matrix belongs",
    ),
    "a head of another vocabulary": ({"lm_head.weight": torch.ones(50, 64)}, "has no d2t to say which"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_make_the_drafter_are_refused(tmp_path, case):
    changes, expected = TENSORS[case]
    config, tensors = FORMATS["DeepSpec"](random_drafter())
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    assert expected in refusal(write(tmp_path, config, tensors))


def test_liquids_drafters_are_refused_by_the_field_that_differs(tmp_path):
    config, tensors = FORMATS["SpecForge"](random_drafter())
    del config["dflash_config"]["projector_type"]
    config.update(architectures=["Lfm2DSparkDraftModel"], rope_is_neox_style=False)
    tensors = {name.removeprefix("logit_head."): tensor for name, tensor in tensors.items()}
    assert "rope_is_neox_style" in refusal(write(tmp_path, config, tensors))


def test_speculators_files_without_what_they_need_are_refused(tmp_path):
    reduced = random_drafter(draft_vocab_size=41)
    config, tensors = FORMATS["speculators"](reduced)
    del tensors["lm_head.weight"]
    assert "has no lm_head.weight" in refusal(write(tmp_path / "a", config, tensors))
    tokens = {"proposal_methods": [{"speculative_tokens": 2}]}
    folder = write_drafter(
        tmp_path / "b", random_drafter(), "speculators", speculators_config=tokens, sample_from_anchor=None
    )
    assert "speculative_tokens 2 for a block_size of 5" in refusal(folder)
    assert AutoDrafter.from_pretrained(folder, target=tiny_target("llama"), first_slot=0).max_num_draft_tokens == 5
    assert "`first_slot` is 2" in refusal(folder, first_slot=2)
    assert "`num_draft_tokens` is -1" in refusal(folder, num_draft_tokens=-1)


def test_a_rotary_embedding_that_is_not_gemmas_is_refused(tmp_path):
    rope = {"full_attention": {"rope_type": "yarn", "factor": 2.0}}
    folder = write_drafter(tmp_path, random_drafter(**GEMMA4), rope_parameters=rope)
    assert "type 'yarn'; Gemma 4's is 'proportional'" in refusal(folder)


def test_a_draft_longer_than_the_block_is_refused(tmp_path):
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(write_drafter(tmp_path, random_drafter()), target=target)
    with pytest.raises(ValueError, match=r"`num_assistant_tokens` is 6; this 'dspark' drafter drafts at most 5 tokens"):
        target.generate(**prompts([5]), assistant_model=drafter, num_assistant_tokens=6, max_new_tokens=4)


def test_targets_without_a_drafter_of_their_own_are_refused(tmp_path):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="the target was not loaded from a repository"):
        AutoDrafter.for_target(target, "dspark")
    target.save_pretrained(tmp_path)
    loaded = type(target).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no folder 'dspark'"):
        AutoDrafter.for_target(loaded, "dspark")
    loaded.config = copy.deepcopy(loaded.config)
    loaded.config.dspark_block_size = 5
    with pytest.raises(ValueError, match=r"among its own weights \(mtp\.\*"):
        AutoDrafter.for_target(loaded, "dspark")
