# SPDX-License-Identifier: Apache-2.0
"""Whole engines on emulated Turing: the tensor-core lowering against Triton's own.

    python3 benchmarks/triton_turing_engine.py --out results/ --commit $(git rev-parse HEAD)
    python3 benchmarks/triton_turing_engine.py --judge results/triton_turing_engine.json

The first needs a GPU. The small trained model generates greedily with both lowerings, without
speculation and with k=3, after prompts of several lengths; a random model of Qwen3.5-4B's shape is
timed over prefill and decoding. All engines use TRITON_ATTN and upstream's Triton prefill of the
GDN layers. The second needs none: wherever two runs chose different tokens, it computes the logits
of both in float64 with transformers (whose delta rule computes in fp32), and compares their gap
with the error of stock's own run.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from provenance import provenance
from triton_turing import TABLE_OF, Meeting, Process, emulating, gather, lower

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = REPOSITORY / "tests" / "models" / "tiny-qwen3_5"
TEXT = REPOSITORY / "tests" / "data" / "genesis.txt"
LENGTHS = (19, 130, 512, 1543, 3071)
TOKENS = 128
PREFILLS = (2048, 8192, 16000)
DECODED = 128

# Qwen3.5-4B's text model, one multi-token-prediction layer; the vocabulary is a round number.
RANDOM_4B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_type": "default",
    },
    "partial_rotary_factor": 0.25,
    "mtp_num_hidden_layers": 1,
    "attn_output_gate": True,
}


def engine(model: Path, k: int, **options: Any) -> Any:
    from vllm import LLM

    if k:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": k}
    return LLM(
        str(model),
        dtype="float16",
        attention_backend="TRITON_ATTN",
        gdn_prefill_backend="triton",
        enable_prefix_caching=False,
        seed=0,
        **options,
    )


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
    """Seconds, and each prompt's output."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    if tokens == 1:
        parameters.logprobs = None
    start = time.monotonic()
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, parameters, use_tqdm=False)
    return time.monotonic() - start, [output.outputs[0] for output in outputs]


def prompts() -> list[list[int]]:
    """One of each length, each from another place of the text that the small model comes from."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    text = tokenizer.encode(TEXT.read_text()).ids
    return [text[length : 2 * length] for length in LENGTHS]


def small_model(k: int) -> dict[str, Any]:
    """Tokens after each prompt, one request at a time, with the logarithm of each one's chance."""
    llm = engine(
        SMALL,
        k,
        max_model_len=LENGTHS[-1] + TOKENS + 64,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,
    )
    answers = []
    for prompt in prompts():
        _, [output] = generate(llm, [prompt], TOKENS)
        chances = [
            at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)
        ]
        answers.append({"prompt": prompt, "tokens": list(output.token_ids), "logprobs": chances})
    return {"answers": answers}


def random_4b(folder: Path, meeting: Meeting) -> dict[str, Any]:
    """Milliseconds of prefills, and decoded tokens a second at two lengths of context."""
    import random

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RANDOM_4B))
    llm = engine(
        folder,
        0,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=PREFILLS[-1] + 1000,
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        kv_cache_memory_bytes=6 << 30,
        gpu_memory_utilization=0.3,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )

    def prompt(tokens: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(1000, 100000), k=tokens)

    for tokens in (512, 8192):
        generate(llm, [prompt(tokens, 99)], 8)
    meeting.ready()
    with meeting.turn():
        prefill = {
            tokens: min(generate(llm, [prompt(tokens, seed)], 1)[0] for seed in range(3))
            for tokens in PREFILLS
        }
        decode = {}
        for tokens in (512, 8192):
            one, many = (generate(llm, [prompt(tokens, 7)], n)[0] for n in (1, DECODED + 1))
            decode[tokens] = DECODED / (many - one)
    return {
        "prefill_ms": {str(n): round(s * 1e3, 1) for n, s in prefill.items()},
        "prefill_tokens_s": {str(n): round(n / s) for n, s in prefill.items()},
        "decode_tokens_s": {str(n): round(rate, 1) for n, rate in decode.items()},
    }


def one_process(name: str, out: Path) -> None:
    from vllm.pre_ampere.kernels.triton import launch_configurations

    model, lowering, k = name.split("-")
    lower(lowering)
    launch_configurations.pin(TABLE_OF[lowering])
    start = time.monotonic()
    meeting = Meeting(out, name)
    row = small_model(int(k[1:])) if model == "small" else random_4b(out / f"{name}.model", meeting)
    row |= {"lowering": lowering, "k": int(k[1:]), "seconds": round(time.monotonic() - start, 1)}
    (out / f"{name}.rows").write_text(json.dumps(row))


def judge(path: Path) -> int:
    """Add where the runs' tokens leave those of stock without speculation, and whether by a tie."""
    from float64_judge import Judge

    result = json.loads(path.read_text())
    runs = {name: row["answers"] for name, row in result["runs"].items() if "answers" in row}
    base = runs.pop("small-stock-k0")
    judging = Judge(SMALL)
    asked = [answer["prompt"] for answer in base]
    verdicts = {name: judging.judge(asked, base, answers) for name, answers in runs.items()}
    result["judged"] = {name: asdict(verdict) for name, verdict in verdicts.items()}
    result["passed"]["tokens differ only where float64 cannot tell them apart"] = all(
        verdict.only_ties for verdict in verdicts.values()
    )
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("judged", "passed")}))
    return 0 if all(result["passed"].values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--seconds", type=float, default=280, help="limit for all of it")
    parser.add_argument("--judge", type=Path, help="compare the tokens of a result in float64")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        return judge(arguments.judge)
    if arguments.process:
        one_process(arguments.process, arguments.out)
        return 0
    work = arguments.out / "triton_turing_engine"
    work.mkdir(parents=True)
    names = [f"small-{lowering}-k{k}" for lowering in ("stock", "mma") for k in (0, 3)]
    names += ["4b-stock-k0", "4b-mma-k0"]
    wanted = {
        name: Process(
            [__file__, "--out", str(work), "--process", name],
            {**emulating(name.split("-")[1]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        for name in names
    }
    rows, failures = gather(wanted, work, arguments.seconds)
    passed = {"every engine ended well": not failures}
    faster = {}
    if {"4b-stock-k0", "4b-mma-k0"} <= rows.keys():
        stock, mma = (rows[f"4b-{lowering}-k0"]["prefill_ms"] for lowering in ("stock", "mma"))
        faster = {n: round(stock[n] / mma[n], 2) for n in stock}
    result = {
        **provenance(arguments.commit),
        "runs": rows,
        "prefill_times_stock": faster,
        "passed": passed,
        "failures": failures,
    }
    (arguments.out / "triton_turing_engine.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("prefill_times_stock", "passed")}))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
