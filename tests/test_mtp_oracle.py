"""Where transformers itself runs a family's MTP layers, it and this package give one set of logits."""

import pytest
import torch
from mtp_formats import FAMILIES, deepseek_v3, write_target
from mtp_rounds import rounds_of
from tiny import prompts
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_specdec import AutoDrafter

# Layers of each family. Step's are not among them: transformers gives its sliding MTP layers the heads of full ones.
DEPTHS = {"deepseek_v3": 2, "glm4_moe": 1, "mellum": 1, "inkling": 2, "inkling_without_norm": 2}


@pytest.mark.parametrize("family", DEPTHS)
def test_logits_are_those_of_transformers_own_layers(tmp_path, family):
    published = deepseek_v3(2) if family == "deepseek_v3" else FAMILIES[family]()
    target = published.auto.from_pretrained(write_target(tmp_path, published))
    target._keys_to_ignore_on_load_unexpected = [r"\.layers\.[34]\.", r"mtp\."]  # how transformers knows the tensors
    theirs = MtpModel.from_pretrained(target).eval()
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=DEPTHS[family])
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=24, eos_token_id=None)
    for (text,), _, scores, _ in rounds:
        ids = torch.tensor([text])
        with torch.no_grad():
            states = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
            cache = MtpCache(config=target.config.get_mtp_config())
            positions = torch.arange(1, ids.shape[1])[None]
            _, logits, _ = theirs(ids[:, 1:], states, None, positions, cache)
        num_drafted = scores.shape[1]
        assert torch.allclose(scores, logits[:, :num_drafted], atol=1e-4)
