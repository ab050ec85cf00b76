"""MTP layers written from their formulas: one row, fp64, everything recomputed from scratch, no cache.

The decoder layers are transformers'; all around them is written out here. Text x_0 .. x_n; the target has processed all
but x_n. Entry t of layer i holds token x_{t+1+i} and a state: of the target at t, or of the layer before.
"""

import copy

import torch
from mtp_published import Layer, Published

EPS = 1e-6


class Reference:
    """Logits that MTP layers must give.

    Args:
        published: the layers.
        target: the model whose hidden states they read.
        variant: a mistake to make, for negative controls.
    """

    def __init__(self, published: Published, target: torch.nn.Module, variant: str = "") -> None:
        self.published, self.target, self.variant = published, target, variant
        self.blocks = [[copy.deepcopy(block).double() for block in layer.blocks] for layer in published.layers]
        self.embedding = target.get_input_embeddings().weight.detach().double()
        self.head = target.get_output_embeddings().weight.detach().double()
        self.rotary = getattr(target.get_decoder(), "rotary_emb", None)

    @torch.no_grad()
    def __call__(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted), V] logits from which each of the drafted tokens was chosen."""
        layers, tokens, n = self.published.layers, [*text, *drafted], len(text) - 1
        states = target_states = self.target_states(text[:-1])
        logits = []
        for depth in range(len(drafted)):
            if depth < len(layers):
                chained = self.published.chained != (self.variant == "other chain")
                entries = (tokens[1 + depth : 1 + depth + n], states if chained else target_states)
            else:  # past the last layer, that one goes on
                entries = ([*entries[0], tokens[n + depth]], torch.cat([entries[1], states[-1:]]))
            out = self.layer(min(depth, len(layers) - 1), *entries)
            normed = self.normed(out, layers[min(depth, len(layers) - 1)], "final")
            logits.append(normed[-1] / self.published.divisor @ self.head.T)
            is_normed = (self.published.carry == "normed") != (self.variant == "other carry")
            states = normed if is_normed else out
        return torch.stack(logits)

    def target_states(self, ids: list[int]) -> torch.Tensor:
        decoder, seen = self.target.get_decoder(), []
        norm = decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm
        hook = norm.register_forward_hook(lambda m, args, out: seen.extend((args[0], out)))
        self.target(torch.tensor([ids]))
        hook.remove()
        return seen[0 if self.variant == "target's raw state" else 1][0].double()

    def layer(self, index: int, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        layer = self.published.layers[index]
        tokens = torch.tensor(tokens if self.variant != "token of the state" else [tokens[0], *tokens[:-1]])
        parts = [
            self.normed(self.embedding[tokens], layer, "embedding"),
            self.normed(states, layer, "hidden"),
        ]
        if self.published.hidden_first != (self.variant == "other order"):
            parts.reverse()
        x = torch.cat(parts, dim=-1) @ layer.projection.double().T
        x, positions = x[None], torch.arange(len(x))[None]
        distance = positions[0][:, None] - positions[0]
        window = self.published.window or len(tokens)
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=torch.double).masked_fill(hidden, -torch.inf)[None, None]
        rotation = {}
        if self.rotary is not None:
            kind = self.published.kind
            rotation["position_embeddings"] = self.rotary(x, positions, **({"layer_type": kind} if kind else {}))
        for block in self.blocks[index]:
            x = block(x, attention_mask=mask, position_ids=positions, **rotation)
            x = x[0] if isinstance(x, tuple) else x
        return x[0]

    def normed(self, x: torch.Tensor, layer: Layer, name: str) -> torch.Tensor:
        if name not in layer.norms:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * layer.norms[name].double()
