"""EAGLE-3 and P-EAGLE against another project's networks: the wheel `speculators`, where it and its imports are."""

import pytest
import torch
from tiny import VOCAB_SIZE, prompts, randomise, tiny_target
from watched import rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.training.batches import Batch
from hf_specdec.training.eagle3 import Eagle3Training

pytestmark = pytest.mark.oracle

DRAFT_VOCAB_SIZE, NUM_TOKENS, DEPTHS = 41, 20, 3
VARIANTS = {
    "plain": dict(),
    "residual after the norm": dict(norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True, norm_before_residual=True),
    "EAGLE-3.1": dict(fc_norm=True, norm_output=True),
    "two layers": dict(num_hidden_layers=2),
    "sliding window": dict(sliding_window=6, layer_types=["sliding_attention"], use_sliding_window=True),
    "five hidden states": dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 2, 3]),
}


def their_head(kind: str, options: dict, method: str = "eagle3", name: str = "Eagle3"):
    """Their network with random weights; its layers are those of a Llama or a Qwen3."""
    theirs = pytest.importorskip(f"speculators.models.{method}", reason="needs speculators and all that it imports")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    options = dict(options)
    layer_fields = ("num_hidden_layers", "sliding_window", "layer_types", "use_sliding_window")
    layer = {"num_hidden_layers": 1, **{name: options.pop(name) for name in layer_fields if name in options}}
    layer_config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        **layer,
    )
    layer_config._attn_implementation = "eager"
    config = getattr(theirs, f"{name}SpeculatorConfig")(
        transformer_layer_config=layer_config,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{"eagle_aux_hidden_state_layer_ids": [0, 2, 3], **options},
    )
    head = getattr(theirs, f"{name}DraftModel")(config).eval().float()
    randomise(head, seed=3)
    kept = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:DRAFT_VOCAB_SIZE].sort().values
    head.d2t = kept - torch.arange(DRAFT_VOCAB_SIZE)
    head.t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept, True)
    return head, kept


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_depth_has_the_logits_of_speculators(tmp_path, kind, variant):
    head, kept = their_head(kind, VARIANTS[variant])
    head.save_pretrained(tmp_path)
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target, own_embedding=True)

    ids = torch.randint(3, VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    layers = drafter.model.config.aux_layers
    states = torch.randn(1, NUM_TOKENS, len(layers) + 1, 64, generator=torch.Generator().manual_seed(6))
    theirs: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, inputs, output: theirs.append(output))
    with torch.no_grad():
        head(
            states[:, :-1, :-1].flatten(2),
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, NUM_TOKENS - 1, dtype=torch.long),
            ttt_steps=DEPTHS,
        )
        training = Eagle3Training(drafter.model, target, kept, DEPTHS, decay=1.0)
        training.embedding = drafter.model.embed_tokens.weight
        batch = Batch(ids, torch.tensor([NUM_TOKENS]), torch.tensor([1]), states)
        ours = [drafter.model.lm_head(drafter.model.norm(output)) for output in training.unroll(batch)]
    # Their training counts a window from the row, as if nothing had been drafted; servers and we count from the draft.
    depths = 1 if "sliding_window" in VARIANTS[variant] else DEPTHS
    assert len(ours) == len(theirs) == DEPTHS
    for depth, (one, other) in enumerate(zip(ours[:depths], theirs[:depths], strict=True)):
        rows = NUM_TOKENS - 1 - depth  # the rows whose token is still one of the text
        torch.testing.assert_close(one[:, :rows], other[:, :rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", [*VARIANTS, "four layers"])
def test_parallel_drafts_have_the_logits_of_speculators(tmp_path, monkeypatch, kind, variant):
    options = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], **VARIANTS.get(variant, {"num_hidden_layers": 4})}
    if variant == "five hidden states":
        options["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2, 2, 1]
    head, _ = their_head(kind, {"mask_token_id": 7, **options}, "peagle", "PEagle")
    head.save_pretrained(tmp_path)
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert drafter.max_num_draft_tokens == DEPTHS
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=16, eos_token_id=None)

    theirs: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, inputs, output: theirs.append(output[0, -DEPTHS:]))
    monkeypatch.setattr("speculators.models.peagle.core.compute_metrics", lambda **kwargs: (None, {}))  # wants a GPU
    for texts, _, scores, _ in rounds:
        ids, num_entries, num_drafted = torch.tensor(texts), len(texts[0]) - 1, scores.shape[1]
        if num_drafted < DEPTHS:
            continue
        # One chain of masks behind the text. The rows that it stands on have to exist, whatever they hold.
        anchors = torch.cat([torch.arange(num_entries), torch.full((DEPTHS - 1,), num_entries - 1)])
        depths = torch.cat([torch.zeros(num_entries, dtype=torch.long), torch.arange(1, DEPTHS)])
        monkeypatch.setattr(
            "speculators.models.peagle.core.generate_cod_sample_indices",
            lambda *args, chain=(anchors, depths), **kwargs: chain,
        )
        padding = (0, 0, 0, DEPTHS - 1)
        with torch.no_grad():
            states = target(ids[:, :-1], output_hidden_states=True).hidden_states
            aux = torch.cat([states[i] for i in options["eagle_aux_hidden_state_layer_ids"]], dim=-1)
            head(
                torch.nn.functional.pad(aux, padding),
                input_ids=torch.nn.functional.pad(ids[:, 1:], padding[2:]),
                document_ids=torch.zeros(1, num_entries + DEPTHS - 1, dtype=torch.long),
                verifier_last_hidden_states=torch.nn.functional.pad(states[-1], padding),
            )
        torch.testing.assert_close(scores[0][:, drafter.target_ids], theirs[-1], atol=1e-5, rtol=1e-4)
    assert len(theirs) >= 3
