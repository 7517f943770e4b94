"""Tiny random Llama checkpoints, written by transformers, for tests of the device wing and the loader."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_tiny_llama(folder: Path, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> LlamaForCausalLM:
    """Write a checkpoint into ``folder`` and return the model it holds, for reference results in float32."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def limit_windows(model: LlamaForCausalLM, windows: Sequence[int]) -> None:
    """Let layer i of the reference see ``windows[i % len(windows)]`` tokens, itself included, by an explicit mask."""
    for i, layer in enumerate(model.model.layers):
        window = windows[i % len(windows)]

        def mask_out(
            module: torch.nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, Any], window: int = window
        ) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
            positions = torch.arange(args[0].shape[1])
            distance = positions[:, None] - positions
            is_seen = (distance >= 0) & (distance < window)
            mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, float("-inf"))
            return args, {**kwargs, "attention_mask": mask[None, None]}

        layer.register_forward_pre_hook(mask_out, with_kwargs=True)


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position, ``[len(token_ids), vocab_size]``."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely continuation, every token from a whole new pass."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
