"""Which implementation verifies, what is refused, and that both give the same text."""

import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, interpreted, quietly
from tiny import perturbed, prompts, tiny_target

pytest.importorskip("triton")

from hf_specdec import AutoDrafter, SpecConfig
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.lenient import Lenience
from hf_specdec.verification import TARGET, Draft, Noise, OneHot, RoundNoise, implementation, verify
from hf_specdec.verification import kernels as choice

pytestmark = quietly

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def compiled(monkeypatch):
    """As if the kernels were not interpreted."""
    monkeypatch.setattr(choice, "load", lambda: SimpleNamespace(INTERPRETED=False))


@pytest.mark.parametrize(
    ("kernels", "rule", "device", "expected"),
    [
        ("auto", "match", CPU, "torch"),
        ("auto", "coupled", CUDA, "triton"),
        ("auto", "rejection", CUDA, "triton"),
        ("auto", Lenience(0.5), CUDA, "torch"),
        ("torch", "match", CUDA, "torch"),
        ("triton", "match", CUDA, "triton"),
    ],
)
def test_kernels_run_on_a_gpu_and_torch_elsewhere(compiled, kernels, rule, device, expected):
    assert implementation(kernels, rule, device) == expected


def test_without_triton_a_gpu_takes_torch_and_a_demand_is_refused(monkeypatch):
    def load():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(choice, "load", load)
    assert implementation("auto", "match", CUDA) == "torch"
    with pytest.raises(ValueError, match="`kernels` is 'triton', but they cannot be loaded here"):
        implementation("triton", "match", CUDA)


@pytest.fixture
def target_that_must_not_run():
    """A target that tests share, with a hook while one of them uses it."""
    model = tiny_target("llama")
    hook = model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass ran"))
    yield model
    hook.remove()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`kernels` is 'triton', but the target is on cpu and they run on a GPU; use 'auto' or 'torch'"),
        ({"lenience": 0.5}, r"`kernels` is 'triton', but Lenience\(l=0.5\) is verified by torch only"),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_refused_before_any_forward_pass(
    compiled, target_that_must_not_run, options, message
):
    drafter = AutoDrafter.for_target(target_that_must_not_run, "lookup")
    drafter.spec_config = SpecConfig(kernels="triton", **options)
    with pytest.raises(ValueError, match=message):
        target_that_must_not_run.generate(**prompts([5]), do_sample=True, max_new_tokens=4, assistant_model=drafter)


def test_kernels_of_the_hub_are_asked_for_by_name_and_version(monkeypatch):
    asked = []
    hub = SimpleNamespace(get_kernel=lambda name, version: asked.append((name, version)) or "the kernels")
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "hub")
    assert choice.load.__wrapped__() == "the kernels"
    assert asked == [(choice.HUB_REPOSITORY, choice.HUB_VERSION)]
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "here")
    with pytest.raises(ValueError, match="HF_SPECDEC_KERNELS is 'here'"):
        choice.load.__wrapped__()


@interpreted
@pytest.mark.parametrize("rule", ["greedy", "match", "coupled", "rejection", "block"])
def test_both_give_the_same_text(rule):
    sampling: dict = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    options = {"seed": 3, "num_draft_tokens": 3, "draft_sampling": "sample", "rule": rule}
    if rule == "greedy":
        sampling, options = {"do_sample": False}, {"num_draft_tokens": 3}
    model = tiny_target("llama")
    texts, stats = [], []
    for kernels in ("torch", "triton"):
        drafter = DraftModelDrafter(perturbed(model, 0.3)).bind(model)
        drafter.spec_config = SpecConfig(kernels=kernels, **options)
        texts.append(model.generate(**prompts([5, 3]), **sampling, max_new_tokens=8, assistant_model=drafter))
        stats.append(drafter.last_stats)
    assert torch.equal(*texts)
    assert [s.kernels for s in stats] == ["torch", "triton"]
    assert stats[0].num_accepted == stats[1].num_accepted


@pytest.mark.parametrize("sampled", [False, True])
def test_both_follow_a_tree_alike_and_mark_broken_rows(sampled):
    scores = torch.randn(3, 6, 50, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    noise = RoundNoise(Noise.from_seed(4, 3, DEVICE), torch.tensor([2, 9, 30], device=DEVICE), 0) if sampled else None
    parents = torch.tensor([-1, -1, 0, 1, 3], device=DEVICE)
    depths = torch.tensor([[0, 1, 1, 2, 2, 3]], device=DEVICE).expand(3, -1)
    choices = scores.argmax(dim=-1) if noise is None else noise.choose(TARGET, scores, depths)
    tokens = torch.stack([choices[:, 0] + 1, choices[:, 0], choices[:, 1], choices[:, 2], choices[:, 4]], dim=1) % 50
    draft = Draft(tokens, torch.full((3,), 5, device=DEVICE), OneHot(), parents)
    scores[2, 4] = torch.nan  # on the accepted path
    scores[1, 3] = -torch.inf  # off it
    by_torch, by_kernels = (verify(draft, scores, "match", noise, kernels) for kernels in ("torch", "triton"))
    assert by_torch.num_accepted.tolist() == [3, 3, -1]
    for name in ("num_accepted", "tokens", "path"):
        assert torch.equal(getattr(by_torch, name), getattr(by_kernels, name))
    chain = Draft(choices[:, :3], torch.full((3,), 3, device=DEVICE), OneHot())
    rows = scores[:, :4].clone()
    rows[0, 0] = torch.inf
    for kernels in ("torch", "triton"):
        verdict = verify(chain, rows, "match", noise, kernels)
        assert int(verdict.num_accepted[0]) == (-1 if sampled else 0)
