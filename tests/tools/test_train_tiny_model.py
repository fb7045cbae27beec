# SPDX-License-Identifier: Apache-2.0
"""The tool that trains the tiny test model: its draft unrolling, its data, and its checkpoint."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model_data import chat_samples, chat_text, stream, train_tokenizer
from tiny_model_modules import DRAFT_STEPS, TinyModel, tiny_config
from tiny_model_text import bible_blocks, dictionary_blocks
from train_tiny_model import main
from transformers import AutoTokenizer, DynamicCache

WIDTH, VALUE_HEADS, HEAD = 192, 4, 128
# Of GDN's convolution: the channels of query, key and value together.
CHANNELS = 2 * 2 * HEAD + VALUE_HEADS * HEAD

ATTENTION_LAYER = {
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (384, WIDTH),
    "mlp.up_proj.weight": (384, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 384),
    "self_attn.q_proj.weight": (2 * 256, WIDTH),
    "self_attn.k_proj.weight": (128, WIDTH),
    "self_attn.v_proj.weight": (128, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 256),
    "self_attn.q_norm.weight": (64,),
    "self_attn.k_norm.weight": (64,),
}
# As vLLM 0.32's qwen3_5_mtp.py reads them.
DRAFT_TENSORS = {
    "mtp.pre_fc_norm_hidden.weight": (WIDTH,),
    "mtp.pre_fc_norm_embedding.weight": (WIDTH,),
    "mtp.fc.weight": (WIDTH, 2 * WIDTH),
    "mtp.norm.weight": (WIDTH,),
} | {f"mtp.layers.0.{name}": shape for name, shape in ATTENTION_LAYER.items()}
GDN_TENSORS = {
    "A_log": (VALUE_HEADS,),
    "dt_bias": (VALUE_HEADS,),
    "conv1d.weight": (CHANNELS, 1, 4),
    "in_proj_qkv.weight": (CHANNELS, WIDTH),
    "in_proj_z.weight": (VALUE_HEADS * HEAD, WIDTH),
    "in_proj_a.weight": (VALUE_HEADS, WIDTH),
    "in_proj_b.weight": (VALUE_HEADS, WIDTH),
    "norm.weight": (HEAD,),
    "out_proj.weight": (WIDTH, VALUE_HEADS * HEAD),
}


def made_up_blocks(count: int) -> list[str]:
    """Chapters of made-up sentences and dictionary entries, in the form of the real text."""
    chooser = random.Random(7)
    words = ["".join(chooser.choices("abdeilmnorst", k=5)) for _ in range(400)]
    blocks = []
    for number in range(count):
        sentences = [" ".join(chooser.choices(words, k=12)) + "." for _ in range(6)]
        blocks.append("\n".join([f"Chapter {number}", *sentences]))
        blocks.append(f"{chooser.choice(words).upper()}, n. {chooser.choice(sentences)}")
    return blocks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text("\n\n".join(made_up_blocks(100)) + "\n", encoding="utf-8")
    main(
        text=folder / "text.txt",
        output=folder / "checkpoint",
        steps=2,
        seconds=60,
        device="cpu",
        rows=2,
        length=64,
        evaluation_rows=1,
        seed=1,
    )
    return folder / "checkpoint"


@pytest.mark.timeout(120)
def test_the_checkpoint_has_upstreams_names_and_shapes_in_bfloat16(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    draft = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert draft == DRAFT_TENSORS
    prefix = "model.layers.1.linear_attn."
    gdn = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    assert gdn == GDN_TENSORS
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], WIDTH)
    assert "lm_head.weight" not in shapes
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["model_type"] == "qwen3_5_text"
    assert config["dtype"] == "bfloat16"
    assert config["mtp_num_hidden_layers"] == 1
    for tensor in tensors.values():
        assert torch.isfinite(tensor.to(torch.float16)).all()


def test_the_log_reports_the_written_weights(checkpoint: Path) -> None:
    log = json.loads((checkpoint / "training_log.json").read_text())
    assert log["steps"] == 2
    assert log["weights_bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert log["reload_largest_difference"] < 1e-4
    # An untrained model of about 1000 tokens is close to choosing among them evenly.
    assert 5 < log["held_out"]["text"]["loss"] < 8


def test_the_tokenizer_loads_and_writes_chat_as_the_samples_do(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text in (
        "In the beginning, 42 naïve\n\n lions — didn't.",
        "<|im_start|>user\nHi<|im_end|>\n",
    ):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text
    assert len(tokenizer("<|im_end|>")["input_ids"]) == 1
    messages = [
        {"role": "user", "content": "Define lion."},
        {"role": "assistant", "content": "A cat."},
    ]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert written == chat_text("Define lion.", "A cat.", system=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert written.startswith(prompt)
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )


@torch.no_grad()
def test_unrolled_drafts_are_what_a_server_computes_one_by_one() -> None:
    torch.manual_seed(3)
    length = 11
    model = TinyModel(tiny_config(64, 1, 0), seed=3).eval()
    for parameter in model.mtp.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    tokens = torch.randint(64, (1, length))
    _, unrolled = model(tokens)

    main_model, mtp = model.main.model, model.mtp
    hidden = main_model(input_ids=tokens, use_cache=False).last_hidden_state
    embedding = main_model.embed_tokens(tokens)

    def draft(cache: DynamicCache, previous: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + previous.shape[1])[None]
        following = embedding[:, first + 1 : first + 1 + previous.shape[1]]
        joined = [mtp.pre_fc_norm_embedding(following), mtp.pre_fc_norm_hidden(previous)]
        output = mtp.layers[0](
            mtp.fc(torch.cat(joined, dim=-1)),
            position_embeddings=main_model.rotary_emb(previous, positions),
            past_key_values=cache,
        )
        return mtp.norm(output)

    for last in range(length - DRAFT_STEPS):
        cache = DynamicCache(config=model.main.config)
        output = draft(cache, hidden[:, : last + 1], 0)
        for step in range(DRAFT_STEPS):
            if step:
                output = draft(cache, output[:, -1:], last + step)
            expected = model.main.lm_head(output[:, -1])
            torch.testing.assert_close(
                unrolled[step][:, last + step], expected, rtol=1e-4, atol=1e-4
            )


def test_chat_samples_answer_with_the_text() -> None:
    blocks = [
        "LION, n. A cat of some size.\nA stanza.",
        "Chapter 1\nThe lion lay down beside the quiet lamb at evening.",
    ]
    samples = chat_samples(blocks, random.Random(0))
    form = re.compile(
        r"(?:<\|im_start\|>system\n.+<\|im_end\|>\n)?<\|im_start\|>user\n(.+)<\|im_end\|>\n"
        r"<\|im_start\|>assistant\n(.+)<\|im_end\|>\n"
    )
    answers = [form.fullmatch(sample).groups() for sample in samples]  # type: ignore[union-attr]
    assert {
        answer for request, answer in answers if "lion" in request and "Con" not in request
    } >= {"A cat of some size."}
    verse = blocks[1].split("\n")[1]
    continued = [
        (request.split(": ", 1)[1], answer) for request, answer in answers if ": " in request
    ]
    assert [f"{start} {rest}" for start, rest in continued] == [verse]


def test_crops_at_starts_begin_with_a_document() -> None:
    tokenizer = train_tokenizer(made_up_blocks(30))
    documents = [f"<|im_start|>{word}<|im_end|>" for word in ("adam", "eden", "noah", "sinai")]
    joined = stream(documents, tokenizer)
    generator = torch.Generator().manual_seed(0)
    crops = joined.crops(20, 3, generator, at_starts=True)
    assert (crops[:, 0] == tokenizer.convert_tokens_to_ids("<|im_start|>")).all()
    with pytest.raises(ValueError, match=r"a crop needs 1000"):
        joined.crops(1, 1000, generator, at_starts=False)


def test_the_text_has_chapters_and_entries_without_layout() -> None:
    printed = "\nGenesis 1\n\n  1 In the beginning.\n  2 And the earth.\n\nGenesis 2\n\n  1 Thus.\n"
    assert bible_blocks(printed) == [
        "Genesis 1\nIn the beginning.\nAnd the earth.",
        "Genesis 2\nThus.",
    ]
    printed = (
        "Notice\n\nABASEMENT, n.  A _decent_\nattitude.\n\n    Two lines\n    of verse\n"
        "            A.B.\n\n    A paragraph\nof prose.\n\nZEAL, n.  Heat.\n\n"
        " abcdefghijklmnopqrstuvwxyz\n"
    )
    assert dictionary_blocks(printed) == [
        "ABASEMENT, n. A decent attitude.\nTwo lines\nof verse\nA.B.\nA paragraph of prose.",
        "ZEAL, n. Heat.",
    ]
