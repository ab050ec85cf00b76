"""DFlash and DFlash 2 against other projects' networks: the wheels `dflash` and `speculators`, where they import."""

import pytest
import torch
from dflash_formats import MASK, random_net, write_net
from dflash_rounds import block_after
from tiny import VOCAB_SIZE, randomise, tiny_target

from hf_specdec import AutoDrafter

pytestmark = pytest.mark.oracle

LENGTH = 20  # of the texts
TEXT = torch.randint(5, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(5))
STATES = torch.randn(4, LENGTH, 64, generator=torch.Generator().manual_seed(6))  # of each layer of a target
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
WINDOWS = {
    "full": {},
    "full, causal": dict(causal=(True, True)),
    "sliding, causal": dict(windows=(6, 6), causal=(True, True)),
    "sliding": dict(windows=(6, 6)),
    "mixed": dict(windows=(6, None), causal=(True, False)),
}


def ours(folder, length: int) -> tuple[torch.Tensor, torch.Tensor, AutoDrafter]:
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(folder, target=target)
    states = {i: STATES[i, : length - 1] for i in drafter.model.config.aux_layers}
    return *block_after(drafter, target, TEXT[:length].tolist(), states), drafter


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_candidates", [0, 6], ids=["DFlash", "DFlash 2"])
def test_logits_are_those_of_z_labs_network(tmp_path, num_candidates, windows):
    theirs = pytest.importorskip("dflash.model", reason="needs the wheel dflash and all that it imports")
    net = random_net(3, num_candidates=num_candidates, logit_scale=0.7, logit_cap=5.0, **WINDOWS[windows])
    folder, target = write_net(tmp_path, net), tiny_target("llama")
    kind = theirs.DFlash2DraftModel if num_candidates else theirs.DFlashDraftModel
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    head = target.get_output_embeddings()
    for length in (2, 5, 9, LENGTH):
        states, logits, drafter = ours(folder, length)
        block = torch.tensor([[TEXT[length - 1]] + [MASK] * (net.block_size - 1)])
        hidden = [STATES[i, : length - 1][None] for i in range(4)]
        with torch.no_grad():
            expected = model(
                position_ids=torch.arange(length - 1 + net.block_size)[None],
                noise_embedding=target.get_input_embeddings()(block),
                target_hidden=theirs.extract_context_feature(hidden, model.target_layer_ids),
            )[:, 1:]
            torch.testing.assert_close(logits, model.compute_logits(expected, head)[0], **CLOSE)
            if num_candidates:
                path, _, _ = model.propose(expected, block[:, 0], head, temperature=0.0)
                assert greedy_path(drafter, states, logits, int(TEXT[length - 1])) == path[0].tolist()


def greedy_path(drafter, states: torch.Tensor, logits: torch.Tensor, previous: int) -> list[int]:
    """The likeliest candidate of each row after the one before."""
    selector, path = drafter.model.candidate_selector, []
    for state, row in zip(states, logits, strict=True):
        likeliest, ids = row.topk(selector.num_candidates)
        with torch.no_grad():
            previous = int(ids[(likeliest + selector(state, torch.tensor(previous), ids)).argmax()])
        path.append(previous)
    return path


def their_speculator(kind: str, windows: dict, draft_vocab_size: int, **fields):
    """The network of speculators with random weights, the target's embedding, and its head where that is whole."""
    module = pytest.importorskip(f"speculators.models.{kind}", reason="needs speculators and all that it imports")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    sizes, target = windows.get("windows", (None, None)), tiny_target("llama")
    layer = Qwen3Config(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        use_sliding_window=any(sizes),
        sliding_window=6 if any(sizes) else None,
        max_window_layers=0,
        layer_types=["sliding_attention" if size else "full_attention" for size in sizes],
    )
    layer._attn_implementation = "eager"
    names = ("DFlash2SpeculatorConfig", "DFlash2DraftModel")
    names = names if kind == "dflash2" else ("DFlashSpeculatorConfig", "DFlashDraftModel")
    config = getattr(module, names[0])(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        block_size=5,
        aux_hidden_state_layer_ids=[0, 2, 3],
        mask_token_id=MASK,
        sliding_window_non_causal=not any(windows.get("causal", ())),
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )
    model = getattr(module, names[1])(config).eval().float()
    randomise(model, seed=3, std=0.1)
    model.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    if draft_vocab_size == VOCAB_SIZE:
        model.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    else:
        kept = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:draft_vocab_size].sort().values
        model.d2t = kept - torch.arange(draft_vocab_size)
        model.t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept, True)
    return model


@pytest.mark.parametrize("windows", [name for name in WINDOWS if name != "full, causal"])
@pytest.mark.parametrize(
    ("kind", "draft_vocab_size", "fields"),
    [
        ("dflash", VOCAB_SIZE, {}),
        ("dflash", 41, {}),
        ("dflash", VOCAB_SIZE, dict(sample_from_anchor=True)),
        ("dflash2", VOCAB_SIZE, dict(selector_rank=8, selector_top_k=6)),
    ],
    ids=["whole vocabulary", "reduced vocabulary", "anchors guess", "DFlash 2"],
)
def test_logits_are_those_of_speculators_training(tmp_path, kind, draft_vocab_size, fields, windows):
    model = their_speculator(kind, WINDOWS[windows], draft_vocab_size, **fields)
    model.save_pretrained(tmp_path)
    num_anchors = 6
    with torch.no_grad():
        hidden, logits, _, _, indices = model._backbone_forward(
            STATES[[0, 2, 3]].transpose(0, 1).flatten(1)[None],
            TEXT[None],
            torch.ones(1, LENGTH),
            STATES[3][None],
            torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=num_anchors,
        )
    first, compared = 0 if fields.get("sample_from_anchor") else 1, 0
    for block in range(num_anchors):
        anchor = int(indices[5 * block])
        if anchor < 1:
            continue
        states, found, drafter = ours(tmp_path, anchor + 1)
        expected = logits[0, 5 * block + first : 5 * block + 5]
        kept = torch.arange(VOCAB_SIZE) if drafter.target_ids is None else drafter.target_ids
        torch.testing.assert_close(found[:, kept], expected, **CLOSE)
        torch.testing.assert_close(states, hidden[0, 5 * block + first : 5 * block + 5], **CLOSE)
        if kind == "dflash2":
            candidates, scores = model.candidate_selector.select(expected[:1], states[:1], TEXT[anchor][None])
            path = greedy_path(drafter, states[:1], found[:1], int(TEXT[anchor]))
            assert path == [int(candidates[0, scores[0].argmax()])]
        compared += 1
    assert compared >= num_anchors - 1
