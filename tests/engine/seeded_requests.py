# SPDX-License-Identifier: Apache-2.0
"""Prompts of 100 tokens with a seed, each in one step and then together in steps of 128 tokens.

    python seeded_requests.py MODEL K

Prints one JSON line: the sampled tokens of each prompt "alone" and "together". A process of its own,
because the platform is chosen once a process, by the environment.
"""

import json
import sys

STEP_TOKENS, PROMPT_TOKENS = 128, 100


def main(model: str, k: int) -> None:
    from vllm import LLM, SamplingParams

    drafting = {"method": "mtp", "num_speculative_tokens": k}
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=STEP_TOKENS,
        generation_config="vllm",
        enforce_eager=True,
        speculative_config=drafting if k else None,
    )
    prompts = [list(range(start, start + PROMPT_TOKENS)) for start in (100, 300, 500)]
    sampling = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(len(prompts))
    ]

    def ask(*which: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompts[index]} for index in which]
        outputs = llm.generate(asked, [sampling[index] for index in which], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    alone = [ask(index)[0] for index in range(len(prompts))]
    print("RESULT " + json.dumps({"alone": alone, "together": ask(*range(len(prompts)))}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
