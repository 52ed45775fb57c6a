"""A Llama of transformers, layer by layer, in a third of the memory of its weights, with the same logits.

Each module of the model gets its weights when it is about to run, and gives them back afterwards. Meanwhile a
thread reads those of the next one. The weights are random, and `save_pretrained` writes several files.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import cold, folder
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import twinbuf as tb


def save(here: Path, layers: int) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    model.save_pretrained(here, max_shard_size="100MB")


def streamed(here: Path, memory_limit: int, **options: Any) -> tuple[LlamaForCausalLM, tb.Stream]:
    """Return the model without weights, and the stream that its modules take them from."""
    config = LlamaConfig.from_pretrained(here)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # computed, and in no file
    modules = {"model.embed_tokens": model.model.embed_tokens}
    modules |= {f"model.layers.{at}": layer for at, layer in enumerate(model.model.layers)}
    modules |= {"model.norm": model.model.norm, "lm_head": model.lm_head}
    groups = [[f"{name}.{part}" for part in module.state_dict()] for name, module in modules.items()]
    tensors = tb.Tensors.open(here / "model.safetensors.index.json")
    stream = tb.stream(tensors, groups, memory_limit=memory_limit, cycle=True, **options)
    now = iter(stream)

    def load(name: str, module: torch.nn.Module, _inputs: Any) -> None:
        nonlocal now
        if module is model.model.embed_tokens:
            now = iter(stream)  # the next token
        weights = next(now).torch()
        module.load_state_dict({part: weights[f"{name}.{part}"] for part in module.state_dict()}, assign=True)

    for name, module in modules.items():
        module.register_forward_pre_hook(partial(load, name))
        module.register_forward_hook(lambda module, _inputs, _output: module.to("meta") and None)
    return model, stream


@torch.no_grad()
def main(layers: int) -> None:
    with folder() as here:
        save(here, layers)
        files = sorted(here.glob("*.safetensors"))
        nbytes = sum(file.stat().st_size for file in files)
        tokens = torch.arange(256)[None]
        wanted = LlamaForCausalLM.from_pretrained(here).eval()(tokens).logits
        cold(*files)
        model, stream = streamed(here, memory_limit=nbytes // 3)
        start = time.perf_counter()
        found = model(tokens).logits
        wall, report = time.perf_counter() - start, stream.report()
        assert torch.equal(found, wanted), "the logits differ"
        print(f"{len(files)} files of {nbytes >> 20} MiB, {stream.kept} of {len(stream)} groups kept")
        print(f"{wall:.3f} s: load {report.load:.3f} s, compute {report.compute:.3f} s, the same logits")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
