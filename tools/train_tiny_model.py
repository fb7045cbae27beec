# SPDX-License-Identifier: Apache-2.0
"""Train the tiny Qwen3.5 test model with its MTP layer, and write its checkpoint.

The loss is next-token cross-entropy plus, for each of three unrolled draft steps, the
cross-entropy against the model's own prediction, since a greedy draft is accepted when it agrees
with the model rather than with the text. Parameters and state stay in float32 until the
checkpoint is rounded to bfloat16; every reported figure is of the rounded weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from safetensors.torch import save_file
from tiny_model_data import END_OF_TEXT, END_OF_TURN, Corpus, make_corpus, train_tokenizer
from tiny_model_evaluation import evaluate
from tiny_model_modules import TinyModel, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE_SHARE = 0.02
WARMUP_SHARE = 0.03
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
DRAFT_LOSS_WEIGHT = 1.0
# Every eighth batch has the same number of tokens in rows four times as long.
LONG_BATCH_EVERY = 8
LONG_BATCH_FACTOR = 4
LOG_EVERY = 50
SIZE_LIMIT_BYTES = 8_000_000


def losses(model: TinyModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The model's loss and each draft step's, in nats a token, for tokens [batch, length]."""
    logits, drafts = model(tokens)
    vocabulary = logits.shape[-1]
    result = [
        nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), tokens[:, 1:].flatten())
    ]
    target = logits[:, 1:].detach().softmax(-1)
    for step, draft in enumerate(drafts):
        result.append(
            nn.functional.cross_entropy(
                draft[:, step:].reshape(-1, vocabulary), target[:, step:].reshape(-1, vocabulary)
            )
        )
    return result


def learning_rate(progress: float) -> float:
    """Linear warmup, then a cosine; `progress` goes from 0 to 1."""
    if progress < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * progress / WARMUP_SHARE
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return PEAK_LEARNING_RATE * (
        FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine
    )


def make_optimizer(model: TinyModel, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone, so not on norms, convolutions and GDN gates."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0}],
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )


def loss_line(
    step: int, seconds: float, parts: list[torch.Tensor], norm: torch.Tensor
) -> dict[str, Any]:
    """Print and return one line of the log; raise FloatingPointError if a loss is not finite."""
    values = [round(part, 4) for part in torch.stack(parts).tolist()]
    if not math.isfinite(sum(values)):
        raise FloatingPointError(f"the loss is not finite at step {step}: {values}")
    line = {
        "step": step,
        "seconds": round(seconds, 1),
        "loss": values[0],
        "draft_losses": values[1:],
        "gradient_norm": round(norm.item(), 3),
    }
    print(json.dumps(line), flush=True)
    return line


def train(
    model: TinyModel,
    corpus: Corpus,
    *,
    steps: int,
    seconds: float,
    rows: int,
    length: int,
    seed: int,
    device: torch.device,
) -> tuple[list[dict[str, Any]], int]:
    """Train until `steps` or `seconds`, whichever comes first; return the loss lines and steps.

    The learning rate follows whichever of the two is further along, so it always ends low.
    """
    optimizer = make_optimizer(model, device)
    generator = torch.Generator().manual_seed(seed)
    lines: list[dict[str, Any]] = []
    model.train()
    began = time.monotonic()
    done = 0
    while (progress := max(done / steps, (time.monotonic() - began) / seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        is_long = done % LONG_BATCH_EVERY == LONG_BATCH_EVERY - 1 and rows >= LONG_BATCH_FACTOR
        factor = LONG_BATCH_FACTOR if is_long else 1
        tokens = corpus.batch(rows // factor, length * factor, generator).to(device)
        parts = losses(model, tokens)
        optimizer.zero_grad()
        (parts[0] + DRAFT_LOSS_WEIGHT * torch.stack(parts[1:]).mean()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        done += 1
        if done % LOG_EVERY == 1:
            lines.append(loss_line(done, time.monotonic() - began, parts, norm))
    lines.append(loss_line(done, time.monotonic() - began, parts, norm))
    return lines, done


def save(model: TinyModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> Path:
    """Round the weights to bfloat16, in the model too, and write everything a server reads."""
    tensors = model.checkpoint()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    output.mkdir(parents=True, exist_ok=True)
    weights = output / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = model.main.config
    config.architectures = [type(model.main).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(output)
    GenerationConfig(
        eos_token_id=config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    ).save_pretrained(output)
    tokenizer.save_pretrained(output)
    size = weights.stat().st_size
    if size > SIZE_LIMIT_BYTES:
        raise ValueError(f"the checkpoint has {size} bytes, more than {SIZE_LIMIT_BYTES}")
    return weights


@torch.no_grad()
def reload_difference(model: TinyModel, output: Path, tokens: torch.Tensor) -> float:
    """Load the checkpoint with transformers and return the largest difference of the logits.

    Raises ValueError when transformers misses a tensor or finds one it does not know.
    """
    loaded, information = AutoModelForCausalLM.from_pretrained(
        output, dtype=torch.float32, output_loading_info=True
    )
    problems = {name: keys for name, keys in information.items() if keys}
    if problems:
        raise ValueError(f"transformers does not load the checkpoint cleanly: {problems}")
    logits, _ = model(tokens)
    reloaded = loaded.to(tokens.device).eval()(input_ids=tokens).logits
    return (logits - reloaded).abs().max().item()


def main(
    text: Annotated[Path, typer.Option(help="Plain text: blocks parted by empty lines.")],
    output: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    steps: Annotated[int, typer.Option(min=1, help="Stop after this many steps.")] = 6000,
    seconds: Annotated[float, typer.Option(min=1, help="Stop training after this time.")] = 210,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    rows: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens a sequence.")] = 512,
    evaluation_rows: Annotated[int, typer.Option(min=1, help="Held-out sequences.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of weights, split and batches.")] = 20110,
) -> None:
    """Train, save, check what was saved, and write training_log.json beside it."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    place = torch.device(device)
    source = text.read_bytes()
    blocks = [block.strip() for block in source.decode("utf-8").split("\n\n")]
    tokenizer = train_tokenizer(blocks)
    corpus = make_corpus(blocks, tokenizer, seed)
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    model = TinyModel(tiny_config(len(tokenizer), end_of_turn, end_of_text), seed).to(place)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, {corpus.text.tokens.shape[0]} tokens of text, "
          f"{corpus.chat.tokens.shape[0]} of chat", flush=True)  # fmt: skip
    began = time.monotonic()
    lines, done = train(
        model,
        corpus,
        steps=steps,
        seconds=seconds,
        rows=rows,
        length=length,
        seed=seed,
        device=place,
    )
    trained_seconds = round(time.monotonic() - began, 1)
    weights = save(model, tokenizer, output)
    # The reload is compared in full float32, where both sides take the same path.
    torch.set_float32_matmul_precision("highest")
    held_out = evaluate(model, corpus.held_out_text, corpus.held_out_chat, evaluation_rows, place)
    sample = corpus.held_out_text.tokens[None, : min(length, 256)].to(place)
    log = {
        "text_sha256": hashlib.sha256(source).hexdigest(),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "weights_bytes": weights.stat().st_size,
        "parameters": parameters,
        "training_tokens": {
            "text": corpus.text.tokens.shape[0],
            "chat": corpus.chat.tokens.shape[0],
        },
        "steps": done,
        "seconds": trained_seconds,
        "tokens_a_step": rows * length,
        "seed": seed,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "held_out": held_out,
        "reload_largest_difference": reload_difference(model, output, sample),
        "loss_lines": lines,
    }
    (output / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(log | {"loss_lines": len(lines)}, indent=1), flush=True)


if __name__ == "__main__":
    typer.run(main)
