"""A random Qwen3.5-MoE checkpoint of a few kilobytes, with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """The cat sat on the mat. A slot is freed when its sequence ends. def step(self): return 1
Ünïcode text — naïve café, 日本語のテキスト, emoji 😀🎉 and more words to merge together again.
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = "<|end|>"


def write_tokenizer(folder: Path, *, template: bool = True) -> int:
    """Returns the vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return tokenizer.get_vocab_size()


def write_checkpoint(folder: Path, *, seed: int = 0, template: bool = True) -> Path:
    """Four layers, hidden 64, eight experts; fp32; eos is token 0."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder, template=template)
    config = Qwen3_5MoeTextConfig(
        vocab_size=size,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim >= 2 and "conv1d" not in name:
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder
