"""DiffusionGemma as the drafter: its passes are those of transformers' class, and the text is the target's."""

import functools

import pytest
import torch
from diffusion_rounds import passes_of
from test_greedy import plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import VOCAB_SIZE, prompts, randomise, tiny_target
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from hf_specdec import AutoDrafter

SLIDING, FULL = "sliding_attention", "full_attention"
CANVAS = 6


@functools.cache
def random_gemma(vocab_size: int = VOCAB_SIZE, std: float = 0.15) -> DiffusionGemmaForBlockDiffusion:
    """Two sliding layers of 8 tokens and a full one, experts, and canvases of up to 16 tokens."""
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "max_position_embeddings": 512,
        "sliding_window": 8,
        "layer_types": [SLIDING, SLIDING, FULL],
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
    vision = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision.update(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=16)
        model = DiffusionGemmaForBlockDiffusion(config).float().eval()
    randomise(model, 0, std)
    return model


def load(folder, model=None, of=None, **options):
    (random_gemma() if model is None else model).save_pretrained(folder)
    options = {"block_size": CANVAS, **options}
    return AutoDrafter.from_pretrained(folder, target=tiny_target("gemma3") if of is None else of, **options)


@pytest.mark.parametrize("lengths", [[13], [13, 9, 3]], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("resample", [False, True])
def test_every_pass_is_that_of_transformers_and_the_text_is_the_targets(tmp_path, lengths, resample):
    target, canvases = tiny_target("gemma3"), []
    drafter = load(tmp_path, num_draft_tokens=4, effort=3, final_resample=resample)

    def keep(module, args, kwargs, output):
        canvases.append((kwargs["decoder_input_ids"], kwargs["self_conditioning_logits"], output.logits))

    drafter.model.register_forward_hook(keep, with_kwargs=True)
    passes = passes_of(drafter, target, prompts(lengths), max_new_tokens=16, eos_token_id=None)
    assert 0 < drafter.last_stats.num_accepted < drafter.last_stats.num_drafted
    assert len(passes) == len(canvases)
    conditioned = 0
    for one, (canvas, thought, logits) in zip(passes, canvases, strict=True):
        assert canvas.shape[1] == CANVAS and torch.equal(one.logits, logits[:, : one.logits.shape[1]])
        conditioned += thought is not None
        for row, text in enumerate(one.texts):
            if one.finished[row]:
                continue
            with torch.no_grad():
                expected = random_gemma()(
                    input_ids=torch.tensor([text]),
                    decoder_input_ids=canvas[row : row + 1],
                    self_conditioning_logits=None if thought is None else thought[row : row + 1],
                ).logits
            assert float((expected[0] - logits[row]).abs().max()) < 1e-4
    assert conditioned > len(canvases) // 2


def test_tokens_stay_where_they_were_put_and_the_rest_is_random(tmp_path):
    drafter, canvases = load(tmp_path, num_draft_tokens=4, effort=3), []

    def keep(module, args, kwargs):
        canvases.append(kwargs["decoder_input_ids"][0].tolist())

    drafter.model.register_forward_pre_hook(keep, with_kwargs=True)
    passes_of(drafter, tiny_target("gemma3"), prompts([9]), max_new_tokens=6, eos_token_id=None)
    for first, second, third in zip(canvases[::3], canvases[1::3], canvases[2::3], strict=False):
        assert sum(a == b for a, b in zip(second, third, strict=True)) >= 2
        assert first != second != third


def test_one_seed_gives_one_text(tmp_path):
    target, inputs = tiny_target("gemma3"), prompts([12, 5])
    expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11))
    for options in ({}, {"effort": 2}, {"effort": 2, "final_resample": True}, {"rule": "match"}):
        drafter = load(tmp_path, seed=11, num_draft_tokens=4, **options)
        assert torch.equal(sample(target, inputs, drafter), expected), options


def test_sampled_text_has_the_targets_law(tmp_path):
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(21)
    model = random_gemma(VOCAB)
    drafter = load(tmp_path, model, target, rule="rejection", effort=2, num_draft_tokens=3, block_size=3)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


def test_it_is_recognised_and_its_canvas_has_a_default(tmp_path):
    target, inputs, drafter = tiny_target("gemma3"), prompts([5]), load(tmp_path, block_size=None)
    assert AutoDrafter.detect(tmp_path).variant == "DiffusionGemma"
    assert drafter.canvas.block_size == 16 and drafter.max_num_draft_tokens == 16
    assert torch.equal(speculative(target, inputs, drafter), plain(target, inputs))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mask_token_id": 3}, "`mask_token_id` is 3; DiffusionGemma has no use for it"),
        ({"attention": "full"}, "`attention` is 'full'; DiffusionGemma has no use for it"),
        ({"block_size": 17}, "`block_size` is 17; give an integer from 1 to 16"),
    ],
    ids=str,
)
def test_options_that_it_has_no_use_for(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path, **options)
