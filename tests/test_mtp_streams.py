"""What MTP layers of targets with hyper-connections cannot do is refused by name, before any forward pass."""

import pytest
import torch
from mtp_formats import FAMILIES, deepseek_v4, random_target, write_standalone, write_target
from tiny import prompts

from hf_specdec import AutoDrafter
from hf_specdec.training.mtp_start import check_attends


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen4_exp"])
def test_streams_are_passed_on_as_they_are(tmp_path, family):
    published = FAMILIES[family]()
    folder = write_standalone(tmp_path, published, mtp_carry="normed")
    with pytest.raises(ValueError, match=rf"mtp_carry 'normed'; layers of {family} pass on the streams as they are"):
        AutoDrafter.from_pretrained(folder, target=random_target(published))


def test_a_dspark_drafter_that_is_named_like_mtp_layers_is_refused(tmp_path):
    published = deepseek_v4()
    target = random_target(published)
    published.tensors["mtp.0.main_proj.weight"] = torch.zeros(64, 192)
    with pytest.raises(ValueError, match=r"has a DSpark drafter \(mtp\.0\.main_proj\.weight\) in the place of MTP"):
        AutoDrafter.for_target(target, "mtp", repository=write_target(tmp_path, published))


def test_rows_of_several_lengths_are_refused_where_the_targets_cache_takes_padding_for_text(tmp_path):
    published = deepseek_v4()
    target = random_target(published)
    drafter = AutoDrafter.from_pretrained(write_standalone(tmp_path, published), target=target)
    with pytest.raises(ValueError, match=r"served without padding only: .* Give rows of one length"):
        target.generate(**prompts([9, 5]), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen4_exp", "hy_v4"])
def test_no_layer_is_trained_for_a_target_with_hyper_connections(family):
    target = random_target(FAMILIES[family]())
    with pytest.raises(ValueError, match=rf"target: the layers of {type(target).__name__} pass on several residual"):
        check_attends(target)
