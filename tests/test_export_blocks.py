"""export/blocks.py: a block drafter that was written is the one that is read."""

import dataclasses

import pytest
import torch
from tiny import VOCAB_SIZE, prompts, randomise, tiny_target
from torch import nn

from hf_specdec import AutoDrafter
from hf_specdec.drafters.common.block_config import BlockConfig
from hf_specdec.drafters.common.block_model import BlockModel
from hf_specdec.drafters.dspark.modeling import DSparkHeads, DSparkModel
from hf_specdec.export.blocks import save_block_drafter

CONFIG = BlockConfig(
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=41,
    target_hidden_size=64,
    aux_layers=(0, 2, 3),
    block_size=5,
    first_slot=1,
    mask_token_id=5,
    windows=(None, None),
    causal=(False, False),
)
HEADS = DSparkHeads(markov_rank=8, confidence=True)
VARIANTS = {
    "DFlash": (CONFIG, None),
    "all tokens": (dataclasses.replace(CONFIG, draft_vocab_size=VOCAB_SIZE), None),
    "windows, causal": (
        dataclasses.replace(CONFIG, windows=(None, 4), causal=(False, True), windows_from_anchor=True),
        None,
    ),
    "windows, both ways": (dataclasses.replace(CONFIG, windows=(4, 4), windows_from_anchor=True), None),
    "DSpark": (dataclasses.replace(CONFIG, first_slot=0), HEADS),
    "DSpark behind the anchor": (CONFIG, HEADS),
    "DSpark, windows": (dataclasses.replace(CONFIG, first_slot=0, windows=(4, None), windows_from_anchor=True), HEADS),
    "gated": (dataclasses.replace(CONFIG, first_slot=0), dataclasses.replace(HEADS, markov_kind="gated")),
    "rnn": (dataclasses.replace(CONFIG, first_slot=0), dataclasses.replace(HEADS, markov_kind="rnn")),
    "no Markov head": (dataclasses.replace(CONFIG, first_slot=0), DSparkHeads(confidence=True)),
    "no confidence": (dataclasses.replace(CONFIG, first_slot=0), DSparkHeads(markov_rank=8)),
}


def random_drafter(config: BlockConfig, heads: DSparkHeads | None) -> tuple[BlockModel, nn.Linear]:
    model = BlockModel(config, False) if heads is None else DSparkModel(config, heads, False)
    head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    randomise(model, seed=1)
    randomise(head, seed=2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 2.0)
    return model.eval(), head


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_read_is_what_was_written(tmp_path, variant):
    (config, heads), target = VARIANTS[variant], tiny_target("llama")
    model, head = random_drafter(config, heads)
    kept = None if config.draft_vocab_size == VOCAB_SIZE else torch.arange(3, 3 + 2 * 41, 2)
    save_block_drafter(tmp_path, model, head, kept, "tiny/llama", torch.float32)
    detected = AutoDrafter.detect(tmp_path)
    assert (detected.method, detected.variant) == ("dflash" if heads is None else "dspark", "speculators")
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert drafter.model.config == dataclasses.replace(config, windows_from_anchor=True)  # without windows, no matter
    assert heads is None or drafter.model.heads.markov_kind == heads.markov_kind
    found = {**drafter.model.state_dict(), "lm_head": drafter.head.weight}
    expected = {**model.state_dict(), "lm_head": head.weight}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert kept is None or torch.equal(drafter.target_ids, kept)
    inputs, options = prompts([9, 4]), dict(max_new_tokens=12, do_sample=False)
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)


def test_a_borrowed_head_is_not_written(tmp_path):
    model, _ = random_drafter(dataclasses.replace(CONFIG, draft_vocab_size=VOCAB_SIZE), None)
    save_block_drafter(tmp_path, model, None, None, "tiny/llama")
    assert AutoDrafter.from_pretrained(tmp_path, target=tiny_target("llama")).head is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(logit_cap=30.0), "no field for scales"),
        (dict(causal=(True, False)), "causal layers without a window"),
        (dict(windows=(4, None)), "counts windows from the anchor"),
        (dict(windows=(4, 5), windows_from_anchor=True), "several sizes"),
    ],
)
def test_what_the_format_cannot_say_is_refused_and_nothing_is_written(tmp_path, changes, sentence):
    model, head = random_drafter(dataclasses.replace(CONFIG, **changes), None)
    with pytest.raises(ValueError, match=sentence):
        save_block_drafter(tmp_path / "drafter", model, head, torch.arange(41), "tiny/llama")
    assert not (tmp_path / "drafter").exists()
