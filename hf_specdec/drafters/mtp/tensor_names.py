"""What MTP layers' tensors are called: (published prefix, prefix in a layer of ours), as told in families.py."""

from __future__ import annotations

DEEPSEEK = (
    ("layers.{L}.enorm.", "embedding_norm."),
    ("layers.{L}.hnorm.", "hidden_norm."),
    ("layers.{L}.eh_proj.", "projection."),
    ("layers.{L}.shared_head.norm.", "final_norm."),
    ("layers.{L}.shared_head.head.", "lm_head."),
    ("layers.{L}.embed_tokens.", "embed_tokens."),
    ("layers.{L}.", "blocks.0."),
)
QWEN = (
    ("mtp.fc.", "projection."),
    ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
    ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
    ("mtp.norm.", "final_norm."),
    ("mtp.embed_tokens.", "embed_tokens."),
    ("mtp.lm_head.", "lm_head."),
    ("mtp.layers.{i}.", "blocks.0."),
)
STEP = (
    *DEEPSEEK,
    *((old.replace("{L}.", "{L}.transformer."), new) for old, new in DEEPSEEK),
    ("layers.{L}.shared_head.output.", "lm_head."),
    ("layers.{L}.transformer.shared_head.output.", "lm_head."),
)
ERNIE = (
    ("mtp_emb_norm.{i}.", "embedding_norm."),
    ("mtp_hidden_norm.{i}.", "hidden_norm."),
    ("mtp_linear_proj.{i}.", "projection."),
    ("mtp_block.{i}.", "blocks.0."),
)
NEMOTRON = (
    ("mtp.layers.{j}.", "blocks.{j}."),
    ("mtp.layers.{j}.enorm.", "embedding_norm."),
    ("mtp.layers.{j}.hnorm.", "hidden_norm."),
    ("mtp.layers.{j}.eh_proj.", "projection."),
    ("mtp.layers.{k}.final_layernorm.", "final_norm."),
)
MIMO = (
    ("mtp_layers.{i}.token_layernorm.", "embedding_norm."),
    ("mtp_layers.{i}.hidden_layernorm.", "hidden_norm."),
    ("mtp_layers.{i}.input_proj.", "projection."),
    ("mtp_layers.{i}.final_layernorm.", "final_norm."),
    ("mtp_layers.{i}.", "blocks.0."),
)
FINAL = (
    *DEEPSEEK[:3],
    ("layers.{L}.final_layernorm.", "final_norm."),
    ("layers.{L}.shared_head.", ""),  # training leaves a copy; the model reads the target's head
    ("layers.{L}.embed_tokens.", ""),
    ("layers.{L}.", "blocks.0."),
)
HY_V4 = tuple((old.replace("layers.{L}.", "mtp_layers.{i}."), new) for old, new in FINAL)
MIMO_V2 = (
    ("mtp.layers.{i}.enorm.", "embedding_norm."),
    ("mtp.layers.{i}.hnorm.", "hidden_norm."),
    ("mtp.layers.{i}.eh_proj.", "projection."),
    ("mtp.layers.{i}.final_layernorm.", "final_norm."),
    ("mtp.layers.{i}.pre_mlp_layernorm.", "blocks.0.post_attention_layernorm."),
    ("mtp.layers.{i}.", "blocks.0."),
)
LONGCAT = (
    ("mtp.layers.{i}.enorm.m.", "embedding_norm."),
    ("mtp.layers.{i}.hnorm.m.", "hidden_norm."),
    ("mtp.layers.{i}.eh_proj.", "projection."),
    ("mtp.norm.", "final_norm."),
    ("mtp.embed_tokens.", "embed_tokens."),
    ("mtp.layers.{i}.transformer_layer.mlp.", "blocks.0.mlp."),
    ("mtp.layers.{i}.", "blocks.0."),
)
INKLING = (
    ("mtp.layers.{i}.embed_norm.", "embedding_norm."),
    ("mtp.layers.{i}.hidden_norm.", "hidden_norm."),
    ("mtp.layers.{i}.input_proj.", "projection."),
    ("mtp.layers.{i}.transformer_block.", "blocks.0."),
    ("mtp.chain_norm.", "final_norm."),
)
DEEPSEEK_V4 = (
    ("mtp.{i}.enorm.", "embedding_norm."),
    ("mtp.{i}.hnorm.", "hidden_norm."),
    ("mtp.{i}.e_proj.", "embedding_projection."),
    ("mtp.{i}.h_proj.", "projection."),
    ("mtp.{i}.norm.", "final_norm."),
    ("mtp.{i}.hc_head_", "hc_head.hc_"),
    ("mtp.{i}.emb.tok_emb.", "embed_tokens."),
    ("mtp.{i}.head.", "lm_head."),
    ("mtp.{i}.", "blocks.0."),
)
QWEN4 = (
    ("mtp.fc_embedding.", "embedding_projection."),
    ("mtp.fc_hidden.", "projection."),
    ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
    ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
    ("mtp.hyper_connection_mixer.block_inject_weight.", ""),  # training leaves it; nothing is put back into the streams
    ("mtp.hyper_connection_mixer.", "hyper_connection_mixer."),
    ("mtp.embed_tokens.", "embed_tokens."),
    ("mtp.shared_head.head.", "lm_head."),
    ("mtp.layers.{i}.", "blocks.0."),
)
