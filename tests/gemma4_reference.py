"""A Gemma 4 assistant written from its formulas: one row, fp64, no cache but that of a fresh run of the target.

It shares no code with the package. Text x_0 .. x_n; the target has read all but x_n. Every token of a draft is asked
from position n. Layer kinds, the layers of the target that are read and the window are those of `gemma4_formats`.
"""

import math

import torch
from gemma4_formats import SHARED, WINDOW, F, S
from transformers import DynamicCache, PreTrainedModel


class Reference:
    """Logits that an assistant must give.

    Args:
        assistant: transformers' model, for its weights and config only.
        target: the model that it drafts for.
        position: of the queries, counted from x_n.
        variant: a mistake to make, for negative controls.
    """

    def __init__(
        self, assistant: PreTrainedModel, target: PreTrainedModel, position: int = 0, variant: str = ""
    ) -> None:
        self.target, self.position, self.variant = target, position, variant
        self.config, self.text = assistant.config, assistant.config.get_text_config()
        self.tensors = {name: tensor.double() for name, tensor in assistant.state_dict().items()}
        self.embedding = target.get_input_embeddings().weight.detach().double()

    def __call__(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted), V] logits from which each of the drafted tokens was chosen."""
        layers, hidden = self.of_target(text[:-1])
        token, state, logits = text[-1], hidden, []
        for step, drawn in enumerate(drafted):
            embedded = self.embedding[token]
            if self.variant != "embedding as it is stored":
                embedded = embedded * math.sqrt(len(embedded))
            pair = [state, embedded] if self.variant == "state first" else [embedded, state]
            x = self.tensors["pre_projection.weight"] @ torch.cat(pair)
            moved = step if self.variant == "a position that advances" else 0
            for i, kind in enumerate(self.text.layer_types):
                x = self.layer(i, x, layers[kind], len(text) - 1 + self.position + moved, kind)
            h = self.norm(x, "model.norm.weight")
            logits.append(self.head(h))
            carry = x if self.variant == "carry before the norm" else h
            token, state = drawn, self.tensors["post_projection.weight"] @ carry
            if self.variant == "carry of the target":
                state = hidden
            if self.variant == "first token again":
                token = text[-1]
        return torch.stack(logits)

    def of_target(self, ids: list[int]) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Kind -> keys and values [heads, n, size] of the text; the last hidden state of its last token."""
        extra = [7] if self.variant == "a rejected token's keys" else []
        cache, before_norm = DynamicCache(), []
        norm = self.target.get_decoder().norm
        watch = norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
        with torch.no_grad():
            output = self.target(torch.tensor([ids + extra]), cache=cache, use_cache=True, output_hidden_states=True)
        watch.remove()
        states = before_norm[-1] if self.variant == "state before the norm" else output.hidden_states[-1]
        index = -2 if self.variant in ("state of the token before", "a rejected token's keys") else -1
        chosen = {S: 0, F: 1} if self.variant == "first layers of their kinds" else SHARED
        if self.variant == "another sliding layer":
            chosen = {**SHARED, S: 2}
        layers = {}
        for kind, i in chosen.items():
            keys, values = (x[0].double() for x in (cache.layers[i].keys, cache.layers[i].values))
            if kind == S and self.variant != "no window":
                seen = {"a wider window": WINDOW, "a narrower window": WINDOW - 2}.get(self.variant, WINDOW - 1)
                keys, values = keys[:, -seen:], values[:, -seen:]
            layers[kind] = keys, values
        return layers, states[0, index].double()

    def layer(self, i: int, x: torch.Tensor, shared: tuple, position: int, kind: str) -> torch.Tensor:
        at = f"model.layers.{i}."
        normed = self.norm(x, at + "input_layernorm.weight")
        keys, values = shared
        size = keys.shape[-1]
        queries = (self.tensors[at + "self_attn.q_proj.weight"] @ normed).view(-1, size)
        queries = torch.stack([self.norm(query, at + "self_attn.q_norm.weight") for query in queries])
        queries = self.rotated(queries, position, kind)
        group, mixed = len(queries) // len(keys), []
        for head, query in enumerate(queries):
            scores = keys[head // group] @ query
            if self.variant == "scaled scores":
                scores = scores / math.sqrt(size)
            mixed.append(scores.softmax(dim=0) @ values[head // group])
        out = self.tensors[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = x + self.norm(out, at + "post_attention_layernorm.weight")
        normed = self.norm(x, at + "pre_feedforward_layernorm.weight")
        gate, up = (self.tensors[at + f"mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        down = self.tensors[at + "mlp.down_proj.weight"] @ (0.5 * gate * (1 + tanh) * up)
        x = x + self.norm(down, at + "post_feedforward_layernorm.weight")
        return x if self.variant == "no layer scalar" else x * self.tensors[at + "layer_scalar"]

    def rotated(self, x: torch.Tensor, position: int, kind: str) -> torch.Tensor:
        """Half of the pairs turn by position * theta^(-2i/d); of a full layer's only the first quarter does."""
        pairs = torch.arange(x.shape[-1] // 2, dtype=torch.float64)
        theta = 1e4 if kind == S else 1e6
        if self.variant == "the other kind's rotation":
            theta = 1e10 / theta
        angles = position * theta ** (-2 * pairs / x.shape[-1])
        if kind == F and self.variant != "every pair turns":
            angles = angles * (pairs < x.shape[-1] // 8)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean() + self.text.rms_norm_eps).sqrt() * self.tensors[name]

    def head(self, h: torch.Tensor) -> torch.Tensor:
        logits = self.tensors["model.embed_tokens.weight"] @ h
        if not self.config.use_ordered_embeddings:
            return logits
        clusters = self.tensors["masked_embedding.token_ordering"].long().view(self.config.num_centroids, -1)
        promise = self.tensors["masked_embedding.centroids.weight"] @ h
        best = promise.argsort(descending=True)[: self.config.centroid_intermediate_top_k]
        scored = torch.zeros(len(logits), dtype=torch.bool)
        scored[clusters[best].flatten()] = True
        return logits if self.variant == "all clusters" else logits.masked_fill(~scored, -torch.inf)
