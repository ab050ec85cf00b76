"""Tiny random models, built in one place."""

import functools
from copy import deepcopy

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
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
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
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
    copy = type(model)(deepcopy(model.config)).float().eval()  # a test may change its config
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return copy


ENCODER_DECODERS = ("t5", "bart", "t5gemma")
_PARTS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def _encoder_decoder(name: str) -> PreTrainedModel:
    common = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, "decoder_start_token_id": 1, **_SPECIAL}
    bart = {**common, **_PARTS, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    if name == "t5":
        return T5ForConditionalGeneration(T5Config(**common, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))
    if name == "bart":
        config = BartConfig(**bart, max_position_embeddings=128, forced_eos_token_id=None)
        return BartForConditionalGeneration(config)
    if name == "t5gemma":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        part = {**common, **shape, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
        config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**part), decoder=T5GemmaModuleConfig(**part), **common)
        return T5GemmaForConditionalGeneration(config)
    if name == "whisper":
        lengths = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 60}
        return WhisperForConditionalGeneration(WhisperConfig(**bart, **lengths))
    raise KeyError(name)


@functools.cache
def tiny_encoder_decoder(name: str = "t5", seed: int = 0) -> PreTrainedModel:
    """A random fp32 encoder-decoder. "t5gemma" slides over 8 tokens, "whisper" hears 100 frames of 8 bins at once.

    Shared between tests: leave it as it is.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _encoder_decoder(name).eval()
    randomise(model, seed, std=0.3 if name == "t5" else 0.1)
    if name == "whisper":
        model.generation_config.update(suppress_tokens=None, begin_suppress_tokens=[EOS, 17])
    return model


def prompts(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """Left-padded random prompts without special tokens: input_ids and attention_mask [B, W]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    columns = torch.arange(width)
    attention_mask = torch.stack([(columns >= width - length).long() for length in lengths])
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}
