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
            index = min(depth, len(layers) - 1)
            out = self.layer(index, *entries)
            join = layers[index].join or (lambda streams: streams)
            normed = self.normed(join(out), layers[index], "final")
            logits.append(normed[-1] / self.published.divisor @ self.head.T)
            is_normed = (self.published.carry == "normed") != (self.variant == "other carry")
            states = normed.repeat(1, self.published.num_streams) if is_normed else out
        return torch.stack(logits)

    def target_states(self, ids: list[int]) -> torch.Tensor:
        """[n, S H] what the target's last layer gives, or that after the final norm."""
        decoder, streams = self.target.get_decoder(), self.published.num_streams
        names = ("hyper_connection_mixer", "norm_f", "norm")
        last = next(getattr(decoder, name) for name in names if hasattr(decoder, name))
        first = last if streams == 1 else getattr(decoder, "hc_head", last)
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            first.register_forward_hook(lambda m, args, out: seen.update(raw=args[0][0].flatten(1).double())),
            last.register_forward_hook(lambda m, args, out: seen.update(normed=out[0].double().repeat(1, streams))),
        ]
        self.target(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        is_raw = (self.published.target_state == "raw") != (self.variant == "target's other state")
        return seen["raw" if is_raw else "normed"]

    def layer(self, index: int, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        layer = self.published.layers[index]
        tokens = torch.tensor(tokens if self.variant != "token of the state" else [tokens[0], *tokens[:-1]])
        streams, size = self.published.num_streams, self.embedding.shape[-1]
        weight = layer.norms["hidden"].shape[-1]  # one state's, or that of all streams
        hidden = self.normed(states.reshape(-1, weight), layer, "hidden").view(-1, streams, size)
        parts = [self.normed(self.embedding[tokens], layer, "embedding")[:, None].expand_as(hidden), hidden]
        if self.published.hidden_first != (self.variant == "other order"):
            parts.reverse()
        x = torch.cat(parts, dim=-1) @ layer.projection.double().T
        x = (x if self.published.streams_apart else x.flatten(1))[None]
        positions = torch.arange(x.shape[1])[None]
        distance = positions[0][:, None] - positions[0]
        window = self.published.window or len(tokens)
        unseen = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=torch.double).masked_fill(unseen, -torch.inf)[None, None]
        rotation = {}
        if self.rotary is not None:
            kind = self.published.kind
            rotation["position_embeddings"] = (
                {name: self.rotary(x, positions, layer_type=name) for name in ("main", "compress")}
                if hasattr(self.rotary, "compress_inv_freq")
                else self.rotary(x, positions, **({"layer_type": kind} if kind else {}))
            )
        for block in self.blocks[index]:
            x = block(x, attention_mask=mask, position_ids=positions, **rotation)
            x = x[0] if isinstance(x, tuple) else x
        return x[0].flatten(1)

    def normed(self, x: torch.Tensor, layer: Layer, name: str) -> torch.Tensor:
        if name not in layer.norms:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * layer.norms[name].double()
