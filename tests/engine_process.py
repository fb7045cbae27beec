# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests: `vllm serve` as a process, and configurations made in a process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm.pre_ampere import environment

TESTS = Path(__file__).parent
TINY_MODEL = TESTS / "models" / "tiny-qwen3_5"
START_SECONDS = 400
# Characters of a failed server's log: those of two processes' tracebacks, the first of which says why.
_LOG_SHOWN = 30000


def clean_environment(emulate: str | None, **settings: str) -> dict[str, str]:
    """The environment of a user who has set nothing of ours but what is given."""
    ours = {variable.name for variable in environment.OURS}
    inherited = {k: v for k, v in os.environ.items() if k not in ours}
    chosen = {} if emulate is None else {environment.EMULATE.name: emulate}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**inherited, **offline, **chosen, **settings}


def configure(emulate: str | None, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one engine configuration for each case; see engine/configure.py."""
    asked = [{"environment": {}, **case} for case in cases]
    return ask(TESTS / "engine" / "configure.py", asked, clean_environment(emulate))


def ask(
    program: Path, cases: Sequence[dict[str, Any]], environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Run a program of the tests that reads cases as lines of JSON and answers each with a RESULT line."""
    done = subprocess.run(
        [sys.executable, str(program)],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    prefix = "RESULT "
    results = [line[len(prefix) :] for line in done.stdout.splitlines() if line.startswith(prefix)]
    return [json.loads(result) for result in results]


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        tokens: the generated token ids.
        logits: for each of them, token id -> raw logit of the most likely ones.
    """

    tokens: tuple[int, ...]
    logits: tuple[dict[int, float], ...] = ()


class Server:
    """A running `vllm serve`, spoken to over its OpenAI API on the loopback interface."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        seconds_apart: float | None = None,
        logits: int | None = None,
        sampled: Sequence[int] = (),
    ) -> list[Answer]:
        """Greedy answers; one after the other, or all together, each `seconds_apart` later.

        The prompts with the indices in `sampled` are answered at temperature 1.
        """
        return asyncio.run(self._complete(prompts, max_tokens, seconds_apart, logits, sampled))

    async def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        seconds_apart: float | None,
        logits: int | None,
        sampled: Sequence[int],
    ) -> list[Answer]:
        async with httpx.AsyncClient(base_url=self.url, timeout=START_SECONDS) as client:

            async def ask(index: int, prompt: Sequence[int]) -> Answer:
                if seconds_apart is not None:
                    await asyncio.sleep(index * seconds_apart)
                response = await client.post(
                    "/v1/completions",
                    json={
                        "model": "tiny",
                        "prompt": list(prompt),
                        "max_tokens": max_tokens,
                        "temperature": 1 if index in sampled else 0,
                        "ignore_eos": True,
                        "return_token_ids": True,
                        "return_tokens_as_token_ids": True,
                        "logprobs": logits,
                    },
                )
                response.raise_for_status()
                choice = response.json()["choices"][0]
                top = choice["logprobs"]["top_logprobs"] if logits is not None else ()
                return Answer(
                    tuple(choice["token_ids"]),
                    tuple(
                        {int(name.removeprefix("token_id:")): value for name, value in at.items()}
                        for at in top
                    ),
                )

            if seconds_apart is None:
                return [await ask(index, prompt) for index, prompt in enumerate(prompts)]
            return list(await asyncio.gather(*(ask(i, p) for i, p in enumerate(prompts))))

    def metric(self, name: str) -> float:
        """The sum of a counter over its labels."""
        text = httpx.get(self.url + "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def serve(
    directory: Path,
    arguments: Sequence[str],
    emulate: str | None = "7.5",
    model: Path = TINY_MODEL,
    **settings: str,
) -> Iterator[Server]:
    """Start `vllm serve`, wait until it answers, and end it with everything it started.

    Raises:
        RuntimeError: it ended before it answered; the message is the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = directory / "serve.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment(emulate, **settings),
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield Server(url, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"exit status {process.returncode}\n{log.read_text()[-_LOG_SHOWN:]}")
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no answer within {START_SECONDS} s\n{log.read_text()[-_LOG_SHOWN:]}")
