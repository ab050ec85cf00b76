"""DSpark against another project's network: the wheel `speculators`, where it is installed with what it imports."""

import pytest
import torch
from tiny import VOCAB_SIZE, randomise, tiny_target
from torch.nn import functional as F

from hf_specdec import AutoDrafter

pytestmark = pytest.mark.oracle

BLOCK_SIZE, NUM_TOKENS, ANCHOR, DRAFT_VOCAB_SIZE = 5, 20, 11, 41
VARIANTS = {
    "vanilla": dict(),
    "gated": dict(markov_head_type="gated"),
    "rnn": dict(markov_head_type="rnn"),
    "rnn behind the anchor": dict(markov_head_type="rnn", sample_from_anchor=False),
    "no markov head": dict(markov_rank=0, confidence_head_with_markov=False),
}


def their_drafter(options: dict):
    """Their network with random weights over layers of Qwen3."""
    dspark = pytest.importorskip("speculators.models.dspark", reason="needs speculators and all that it imports")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
    )
    layer._attn_implementation = "eager"
    anchor = options.get("sample_from_anchor", True)
    config = dspark.DSparkSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=[0, 2, 3],
        mask_token_id=4,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - (not anchor))],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{"markov_rank": 8, **options},
    )
    drafter = dspark.DSparkDraftModel(config).eval().float()
    randomise(drafter, seed=3)
    kept = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:DRAFT_VOCAB_SIZE].sort().values
    drafter.d2t = kept - torch.arange(DRAFT_VOCAB_SIZE)
    drafter.t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept, True)
    return drafter


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_slot_has_the_logits_and_the_confidence_of_speculators(tmp_path, variant):
    theirs = their_drafter(VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    target = tiny_target("llama")
    theirs.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target, own_embedding=False)
    model, first = drafter.model, drafter.model.config.first_slot

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    states = torch.randn(1, NUM_TOKENS, 3 * 64, generator=generator)
    allowed = torch.zeros(1, NUM_TOKENS)
    allowed[:, ANCHOR : ANCHOR + BLOCK_SIZE + 1] = 1.0  # the only place where a whole block is trained on
    with torch.no_grad():
        hidden, logits, _, _, indices = theirs._backbone_forward(
            states, ids, allowed, torch.randn(1, NUM_TOKENS, 64), torch.zeros(1, NUM_TOKENS).long(), max_anchors=1
        )
        anchor, tokens = int(indices[0]), ids[:, indices]
        previous = tokens if first == 0 else torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        if theirs.markov_head is not None:
            logits = logits + theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        features = [hidden]
        if theirs.config.confidence_head_with_markov:
            features.append(theirs.markov_head.prev_embeddings(previous))
        confidence = theirs.confidence_head(torch.cat(features, dim=-1))

        def attend(index, queries, keys, values):
            return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

        rows = torch.tensor([[ids[0, anchor], *[4] * (BLOCK_SIZE - 1)]])
        embedded = F.embedding(rows, target.get_input_embeddings().weight)[:, None]
        context = model.fuse(list(states[:, :anchor].split(64, dim=-1)))
        ours = model(embedded, context, torch.arange(anchor + BLOCK_SIZE)[None], attend)[:, 0]
        torch.testing.assert_close(ours, hidden, atol=1e-5, rtol=1e-4)
        memory, found, sure = None, [], []
        for slot in range(BLOCK_SIZE):
            here, before = ours[:, slot : slot + 1], previous[:, slot : slot + 1]
            row = drafter.logits(here, None)
            if model.markov_head is not None:
                bias, memory = model.markov_head(before, here, memory)
                row = row + bias
            found.append(row)
            w1 = None if model.markov_head is None else model.markov_head.markov_w1(before)
            sure.append(model.confidence_head(here, w1))
    torch.testing.assert_close(torch.cat(found, dim=1), logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(sure, dim=1), confidence, atol=1e-5, rtol=1e-4)
    assert first == (not VARIANTS[variant].get("sample_from_anchor", True))
