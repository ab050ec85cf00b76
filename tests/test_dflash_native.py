"""A drafter in the format of transformers' own DFlash class is that class, and so is one that is converted to it."""

import pytest
import torch
from dflash_formats import MASK, leaving, random_net, write_net
from dflash_reference import Reference
from test_greedy import plain
from tiny import prompts, tiny_target
from watched import rounds_of

from hf_specdec import AutoDrafter

muse = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")


def their_logits(model, target, net, text: list[int]) -> torch.Tensor:
    """[block - 1, V] of their network after a text, in one forward."""
    from transformers.cache_utils import DFlashCache

    states = Reference(net, target).hidden_states(text[:-1])
    context = torch.cat([states[i] for i in net.aux_layers], dim=-1).float()[None]
    block = torch.tensor([[text[-1]] + [MASK] * (net.block_size - 1)])
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(context.shape[1])
    with torch.no_grad():
        states = model(
            noise_embeds=target.get_input_embeddings()(block),
            context_hidden_states=context,
            position_ids=torch.arange(context.shape[1] + net.block_size)[None],
            cache=cache,
        ).last_hidden_state
        return target.get_output_embeddings()(states[0, 1:])


@pytest.mark.parametrize("windows", [(None, None), (6, 6), (None, 4)], ids=["full", "sliding", "mixed"])
@pytest.mark.parametrize("format", ["transformers", "z-lab"])
def test_logits_are_those_of_the_class(tmp_path, format, windows):
    """Bidirectional drafts of z-lab are that class after renaming; a window of theirs is one less than z-lab's."""
    target, net = tiny_target("llama"), random_net(3, windows=windows)
    theirs = muse.MuseGlimmerAssistantModel.from_pretrained(write_net(tmp_path / "theirs", net, "transformers")).eval()
    drafter = AutoDrafter.from_pretrained(write_net(tmp_path / "ours", net, format), target=target)
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=20, eos_token_id=None)
    assert len(rounds) > 3
    for texts, finished, scores, tokens in rounds:
        for row in [row for row, done in enumerate(finished) if not done]:
            expected = their_logits(theirs, target, net, texts[row])[: int((tokens[row] >= 0).sum())]
            torch.testing.assert_close(scores[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_a_window_of_another_width_would_show(tmp_path):
    """Negative control: the window is taken over as the number that it is."""
    target, net = tiny_target("llama"), random_net(3, windows=(6, 6))
    wrong = write_net(tmp_path / "theirs", net, "transformers", sliding_window=6)
    theirs = muse.MuseGlimmerAssistantModel.from_pretrained(wrong).eval()
    drafter = AutoDrafter.from_pretrained(write_net(tmp_path / "ours", net, "z-lab"), target=target)
    texts, _, scores, _ = rounds_of(drafter, target, prompts([11]), max_new_tokens=8, eos_token_id=None)[0]
    assert not torch.allclose(scores[0], their_logits(theirs, target, net, texts[0]), atol=1e-2)


def test_what_config_json_leaves_out_is_the_classs_default(tmp_path):
    target = tiny_target("llama")
    net = random_net(3, windows=(2049, 2049), block_size=16, rope={"rope_type": "default", "rope_theta": 5e5})
    left_out = dict.fromkeys(("rms_norm_eps", "block_size", "rope_parameters", "sliding_window", "layer_types"))
    drafter = AutoDrafter.from_pretrained(write_net(tmp_path, net, "transformers", **left_out), target=target)
    config, theirs = drafter.model.config, muse.MuseGlimmerAssistantConfig()
    assert config.block_size == theirs.block_size and config.rms_norm_eps == theirs.rms_norm_eps
    assert config.windows == (theirs.sliding_window + 1,) * 2 and config.causal == (False, False)
    assert config.rope_parameters["rope_theta"] == theirs.default_theta


def test_logits_are_scaled_and_capped_as_the_targets_are(tmp_path):
    """The class leaves the head to the target; transformers' own generate forgets what the target does behind it."""
    target, net = tiny_target("llama"), random_net(3)
    target.config.output_multiplier, target.config.final_logit_softcapping = 0.5, 20.0
    try:
        drafter = AutoDrafter.from_pretrained(write_net(tmp_path, net, "transformers"), target=target)
    finally:
        del target.config.output_multiplier, target.config.final_logit_softcapping
    assert (drafter.model.config.logit_scale, drafter.model.config.logit_cap) == (0.5, 20.0)


def test_stock_generate_drafts_the_same_tokens_with_the_converted_drafter(tmp_path):
    """One row, greedy: one text, and as many drafts as ours."""
    target, inputs = tiny_target("llama"), prompts([11])
    net = random_net(3, aux_layers=(1, 2))
    folder = write_net(tmp_path, net, "transformers")
    theirs = muse.MuseGlimmerAssistantModel.from_pretrained(folder).eval()
    drafter, options = AutoDrafter.from_pretrained(folder, target=target, governor="off"), {"max_new_tokens": 24}
    ours = plain(target, inputs, assistant_model=drafter, eos_token_id=None, **options)
    calls = []
    hook = theirs.register_forward_hook(lambda *_: calls.append(1))
    found = plain(target, inputs, assistant_model=theirs, speculation_type="dflash", eos_token_id=None, **options)
    hook.remove()
    assert torch.equal(found, ours) and leaving(net) == theirs.config.target_layer_ids
    stats = drafter.last_stats
    assert abs(len(calls) - (stats.num_verifications - stats.num_plain_steps)) <= 1  # theirs may draft past the end
