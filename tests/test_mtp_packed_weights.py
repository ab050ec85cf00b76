"""Packed weights of MTP layers are multiplied out by the scales beside them, or refused by name."""

import pytest
import torch
from mtp_formats import deepseek_v3, deepseek_v4, random_target, write_target
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter


def as_fp8(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 weight, scale of each block) of a weight, rows and columns need not be multiples of the block."""
    rows, columns = tensor.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    weight = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = tensor[part].abs().max() / 448
            weight[part] = (tensor[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return weight, scale


@pytest.mark.parametrize("block", [128, 24])
def test_fp8_weights_are_multiplied_by_the_scales_of_their_blocks(tmp_path, block):
    published = deepseek_v3()
    exact = AutoModelForCausalLM.from_pretrained(write_target(tmp_path / "exact", published))
    expected = AutoDrafter.for_target(exact, "mtp").state_dict()
    packed = {}
    for name, tensor in published.tensors.items():
        packed[name] = tensor
        if tensor.dim() == 2 and "gate.weight" not in name:
            packed[name], packed[name + "_scale_inv"] = as_fp8(tensor, block)
            packed[name.removesuffix("weight") + "input_scale"] = torch.ones(())  # of activations: not asked for
    published.tensors = packed
    exact.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [block, block]}
    write_target(tmp_path / "fp8", published)
    found = AutoDrafter.for_target(exact, "mtp", repository=tmp_path / "fp8").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().max()
        assert torch.allclose(tensor, expected[name], atol=float(scale) / 14), name
        assert tensor.dtype == torch.float32


def test_scales_of_other_blocks_are_refused(tmp_path):
    published = deepseek_v3()
    target = AutoModelForCausalLM.from_pretrained(write_target(tmp_path / "exact", published))
    name = "model.layers.3.eh_proj.weight"
    published.tensors[name], published.tensors[name + "_scale_inv"] = as_fp8(published.tensors[name], 24)
    write_target(tmp_path / "fp8", published)
    with pytest.raises(ValueError, match=r"scale of shape \[3, 6\] for .*eh_proj.* blocks of \[128, 128\]"):
        AutoDrafter.for_target(target, "mtp", repository=tmp_path / "fp8")


def test_packed_weights_are_refused_by_name(tmp_path):
    published = deepseek_v3()
    target = AutoModelForCausalLM.from_pretrained(write_target(tmp_path / "exact", published))
    published.tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 64, dtype=torch.int32)
    write_target(tmp_path / "packed", published)
    with pytest.raises(ValueError, match=r"holds model.layers.3.eh_proj.weight as torch.int32; .* repository="):
        AutoDrafter.for_target(target, "mtp", repository=tmp_path / "packed")


def as_fp4(tensor: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bytes, scale of each 32 columns, what they stand for) with random numbers of a weight's shape."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = tensor.shape
    codes = torch.randint(16, (rows, columns), generator=generator)
    exponents = torch.randint(-4, 0, (rows, columns // 32), generator=generator)
    halves, mantissa = codes >> 1 & 3, codes & 1
    size = torch.where(halves == 0, mantissa / 2, 2.0 ** (halves - 1) * (1 + mantissa / 2))
    numbers = torch.where(codes >> 3 == 1, -size, size) * (2.0**exponents).repeat_interleave(32, dim=1)
    pairs = codes[:, 0::2] + 16 * codes[:, 1::2]
    return pairs.to(torch.uint8).view(torch.int8), (2.0**exponents).to(torch.float8_e8m0fnu), numbers


def test_fp4_experts_and_fp8_weights_of_deepseek_v4_are_multiplied_out(tmp_path):
    exact, packed = deepseek_v4(), deepseek_v4()
    target = random_target(exact)
    for number, (name, tensor) in enumerate(list(exact.tensors.items())):
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            packed.tensors[name], packed.tensors[scale], exact.tensors[name] = as_fp4(tensor, number)
        elif name.endswith(("_proj.weight", "wq_a.weight", "wo_b.weight")):
            packed.tensors[name] = weight = (8 * tensor).to(torch.float8_e4m3fn)
            packed.tensors[scale] = torch.full((1, 1), 0.125).to(torch.float8_e8m0fnu)
            exact.tensors[name] = weight.float() / 8
    write_target(tmp_path / "packed", packed)
    write_target(tmp_path / "exact", exact)
    found, expected = (
        AutoDrafter.for_target(target, "mtp", repository=tmp_path / name).state_dict() for name in ("packed", "exact")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_bytes_without_the_scales_of_fp4_are_refused(tmp_path):
    published = deepseek_v4()
    target = random_target(published)
    name = "mtp.0.ffn.experts.1.w1.weight"
    published.tensors[name], scale, _ = as_fp4(published.tensors[name], 0)
    published.tensors["mtp.0.ffn.experts.1.w1.scale"] = scale[:, :1].contiguous()
    with pytest.raises(ValueError, match=r"holds mtp\.0\.ffn\.experts\.1\.w1\.weight as torch\.int8; .* repository="):
        AutoDrafter.for_target(target, "mtp", repository=write_target(tmp_path, published))
