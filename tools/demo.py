# SPDX-License-Identifier: Apache-2.0
"""Serves the small model as a Turing box would, without and with speculation, and compares.

Starts upstream's `vllm serve` on an emulated card of compute capability 7.5, asks it a few prompts
over the OpenAI API, and does so once more with the model's own MTP layer drafting three tokens a
step. Greedy answers must be the same text; the exit status is 1 where they are not.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import openai
import typer
from rich import box
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / "tests" / "models" / "tiny-qwen3_5"
LOGS = REPOSITORY / "build" / "demo"
NAME = "tiny-qwen3_5"
START_SECONDS = 300
LOG_LINES_SHOWN = 40
TEXT_SHOWN = 40
MAX_TOKENS = 96

# Little of everything: the model is small, and the machine may be.
ARGUMENTS = ("--served-model-name", NAME, "--max-model-len", "2048", "--max-num-seqs", "4")
ENVIRONMENT = {
    "VLLM_PRE_AMPERE_EMULATE": "7.5",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

console = Console()


@dataclass(frozen=True)
class Configuration:
    """One way to serve the model."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """Where the server's output goes."""
        return LOGS / f"{self.name.replace(', ', '-').replace(' ', '-')}.log"


CONFIGURATIONS = (
    Configuration("no speculation"),
    Configuration(
        "MTP, k=3",
        ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3})),
    ),
)


@dataclass(frozen=True)
class Prompt:
    """One question: a text to complete, or a message of a chat."""

    text: str
    chat: bool = False
    stream: bool = False


PROMPTS = (
    Prompt("And it came to pass in those days, that"),
    Prompt("Define HISTORIAN.", chat=True),
    Prompt("Tell me about wisdom.", chat=True, stream=True),
)


@dataclass(frozen=True)
class Result:
    """What one configuration answered.

    Attributes:
        texts: the answers, one a prompt.
        tokens: how many tokens they are, together.
        seconds: from the first request to the end of the last answer.
        acceptance_length: mean tokens that a step of the model yields; None without speculation.
    """

    texts: tuple[str, ...]
    tokens: int
    seconds: float
    acceptance_length: float | None

    @property
    def sha256(self) -> str:
        """Hash of all the answers' text."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


def main(
    model: Annotated[Path, typer.Option(help="Directory of the checkpoint to serve.")] = MODEL,
) -> None:
    """Serve the small model as a Turing box would, without and with speculation, and compare."""
    # What ends this program must end the server, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    LOGS.mkdir(parents=True, exist_ok=True)
    results = {}
    for configuration in CONFIGURATIONS:
        try:
            with served(configuration, model) as url:
                results[configuration.name] = ask_all(configuration, url)
        except RuntimeError as error:
            console.print(f"{configuration.name}: {error}", style="red", markup=False)
            console.print(log_end(configuration.log), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
    if not report(results):
        raise typer.Exit(1)


@contextlib.contextmanager
def served(configuration: Configuration, model: Path) -> Iterator[str]:
    """Start `vllm serve`, wait until it answers, and end it with everything that it started.

    Yields:
        The server's URL, on the loopback interface.

    Raises:
        RuntimeError: it ended, or did not answer within `START_SECONDS`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ("--host", "127.0.0.1", "--port", str(port))
    program = str(Path(sys.executable).with_name("vllm"))
    with configuration.log.open("w") as log:
        server = subprocess.Popen(
            [program, "serve", str(model), *address, *ARGUMENTS, *configuration.arguments],
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(configuration, server, url)
        yield url
    finally:
        end(server)


def wait_until_healthy(
    configuration: Configuration, server: subprocess.Popen[bytes], url: str
) -> None:
    """Wait for the server's first answer, with a line that says how long it has been."""
    title = f"{configuration.name}: vllm serve on an emulated card of capability 7.5"
    begin = time.monotonic()
    with console.status(title) as status, httpx.Client(trust_env=False) as client:
        while (elapsed := time.monotonic() - begin) < START_SECONDS:
            status.update(f"{title}, starting for {elapsed:.0f} s; log: {shown(configuration.log)}")
            if server.poll() is not None:
                raise RuntimeError(
                    f"vllm serve ended with status {server.returncode}; its log ends"
                )
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").is_success:
                    console.print(f"{title}, ready after {elapsed:.0f} s", highlight=False)
                    return
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not answer within {START_SECONDS} s; its log ends")


def end(server: subprocess.Popen[bytes]) -> None:
    """End the server, its engine and its workers: all of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def ask_all(configuration: Configuration, url: str) -> Result:
    """Ask every prompt, one after the other."""
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        ask(client, Prompt("Warm up:"), max_tokens=8)
        before = speculation(url)
        begin = time.monotonic()
        answers = [ask(client, prompt) for prompt in PROMPTS]
        seconds = time.monotonic() - begin
    drafts, accepted = (now - then for now, then in zip(speculation(url), before, strict=True))
    return Result(
        texts=tuple(text for text, _ in answers),
        tokens=sum(tokens for _, tokens in answers),
        seconds=seconds,
        acceptance_length=1 + accepted / drafts if drafts else None,
    )


def ask(client: openai.OpenAI, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> tuple[str, int]:
    """The greedy answer to one prompt, and its length in tokens."""
    if prompt.stream:
        return ask_streaming(client, prompt)
    if prompt.chat:
        chat = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": prompt.text}],
            temperature=0,
            max_completion_tokens=max_tokens,
        )
        assert chat.usage is not None
        return chat.choices[0].message.content or "", chat.usage.completion_tokens
    completion = client.completions.create(
        model=NAME, prompt=prompt.text, temperature=0, max_tokens=max_tokens
    )
    assert completion.usage is not None
    return completion.choices[0].text, completion.usage.completion_tokens


def ask_streaming(client: openai.OpenAI, prompt: Prompt) -> tuple[str, int]:
    """The same for a chat, shown as it comes."""
    console.print(f"  streaming {prompt.text!r}: ", end="", style="dim", highlight=False)
    pieces, tokens = [], 0
    for chunk in client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": prompt.text}],
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            console.print(pieces[-1], end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    return "".join(pieces), tokens


def speculation(url: str) -> tuple[float, float]:
    """How many drafts the server has verified, and how many drafted tokens it has accepted."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()

    def total(counter: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(counter))

    return (
        total("vllm:spec_decode_num_drafts_total"),
        total("vllm:spec_decode_num_accepted_tokens_total"),
    )


def report(results: dict[str, Result]) -> bool:
    """Print the answers and the table; whether all configurations answered the same."""
    equal = len({result.sha256 for result in results.values()}) == 1
    for index, prompt in enumerate(PROMPTS):
        for text in {result.texts[index] for result in results.values()}:
            console.print(f"\n[bold]{prompt.text}[/bold]", highlight=False)
            console.print(text.strip(), markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for column in ("configuration", "text", "tokens/s", "acceptance\nlength", "sha256", "equal"):
        table.add_column(column, no_wrap=column != "text")
    for name, result in results.items():
        table.add_row(
            name,
            " ".join(result.texts[0].split())[:TEXT_SHOWN] + "…",
            f"{result.tokens / result.seconds:.1f}",
            "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}",
            result.sha256[:12],
            "yes" if equal else "NO",
        )
    console.print()
    console.print(table)
    return equal


def log_end(log: Path) -> str:
    """The last lines of a log, and where the rest is."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "\n".join([*lines, f"All of it: {shown(log)}"])


def shown(path: Path) -> Path:
    """The path as someone in the repository would write it."""
    return path.relative_to(REPOSITORY)


if __name__ == "__main__":
    typer.run(main)
