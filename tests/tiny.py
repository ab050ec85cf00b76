"""Tiny random models, built in one place."""

import functools

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 97
PAD, EOS = 0, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
TARGETS = ("llama", "qwen3", "gemma3", "mistral", "gpt_oss", "gpt2")
_SPECIAL = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}


def tiny_config(name: str, vocab_size: int = VOCAB_SIZE) -> PreTrainedConfig:
    """A config of two to four layers; windows of 8 tokens where the family slides."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,  # a tied random model repeats its last token
        **_SPECIAL,
    }
    sliding, full = "sliding_attention", "full_attention"
    if name == "llama":
        return LlamaConfig(**shape)
    if name == "qwen3":
        return Qwen3Config(**shape, head_dim=16)
    if name == "gemma3":
        shape["num_hidden_layers"] = 4
        return Gemma3TextConfig(**shape, head_dim=16, sliding_window=8, layer_types=[sliding, sliding, full, sliding])
    if name == "mistral":
        return MistralConfig(**shape, sliding_window=8)
    if name == "gpt_oss":
        shape.update(num_hidden_layers=2, intermediate_size=64)
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return GptOssConfig(**shape, **experts, head_dim=16, sliding_window=8, layer_types=[sliding, full])
    if name == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=512,
            tie_word_embeddings=False,
            **_SPECIAL,
        )
    raise KeyError(name)


def randomise(model: torch.nn.Module, seed: int, std: float = 0.15) -> None:
    """Weights of one scale: large enough that greedy text is not one token for ever."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


@functools.cache
def tiny_target(name: str = "llama", seed: int = 0, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """A random fp32 target on the CPU. Shared between tests: leave it as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name, vocab_size)).float().eval()
    randomise(model, seed)
    return model


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Words w6, w7, ... with their numbers as ids, after the special tokens; with a chat template."""
    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), vocab_size))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def perturbed(model: PreTrainedModel, amount: float, seed: int = 5) -> PreTrainedModel:
    """A copy of a model that agrees with it now and then; smaller amounts agree more often."""
    copy = type(model)(model.config).float().eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return copy


def tiny_encoder_decoder() -> PreTrainedModel:
    """A random T5."""
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **_SPECIAL)
    config.decoder_start_token_id = PAD
    return T5ForConditionalGeneration(config).eval()


def prompts(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """Left-padded random prompts without special tokens: input_ids and attention_mask [B, W]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    columns = torch.arange(width)
    attention_mask = torch.stack([(columns >= width - length).long() for length in lengths])
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}
