# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on a newer GPU that emulates Turing and Volta: boots, k=3 as k=0, what fixes do.

    python3 benchmarks/emulated_serve.py --out results/ --commit $(git rev-parse HEAD)
    python3 benchmarks/emulated_serve.py --judge results/emulated_serve.json

Starts one server for each run of `RUNS` at the same time, in upstream's normal multi-process mode
with CUDA graphs and Inductor, generates greedily after prompts of ten lengths, and profiles decode
or verify steps. Writes one JSON with everything, each server's log, and a summary; ends 1 where a
check fails.

The second command needs no GPU. Wherever k=3 chose another token than k=0 it compares the two in
float64 and judges by that, and it draws the launches of both as a chart beside the result.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from provenance import provenance

LENGTHS = (19, 64, 130, 512, 1024, 1543, 3071, 6000, 9000, 13004)
TOKENS = 256
PROFILED_STEPS = 32
_REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = _REPOSITORY / "tests" / "models" / "tiny-qwen3_5"
_TESTS = _REPOSITORY / "tests" / "gpu"
_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. And God saw the light, "
    "that it was good: and God divided the light from the darkness."
)


@dataclass(frozen=True)
class Run:
    """One server: what it emulates, its k, and the fix that is taken back."""

    name: str
    capability: str
    k: int
    reverts: str = ""
    environment: dict[str, str] = field(default_factory=dict)


BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
RUNS = (
    Run("sm75-k0", "7.5", 0),
    Run("sm75-k3", "7.5", 3),
    Run("sm70-k0", "7.0", 0),
    Run("sm70-k3", "7.0", 3),
    Run("sm75-k0-batch-invariant", "7.5", 0, environment=BATCH_INVARIANT),
    Run("sm75-k3-batch-invariant", "7.5", 3, environment=BATCH_INVARIANT),
    Run("sm70-k0-batch-invariant", "7.0", 0, environment=BATCH_INVARIANT),
    Run("sm70-k3-batch-invariant", "7.0", 3, environment=BATCH_INVARIANT),
    Run("sm75-k3-without-baseline-fix", "7.5", 3, "baseline"),
    Run("sm75-k3-without-verification-fix", "7.5", 3, "verification"),
    Run(
        "sm75-k3-without-gate-fix",
        "7.5",
        3,
        "gate",
        {"VLLM_SM70_QWEN_GDN_FULL_FORWARD": "1"},
    ),
)


class Server:
    """A `vllm serve` process group with caches, ranks' records and traces of its own."""

    def __init__(self, run: Run, port: int, out: Path, work: Path) -> None:
        self.run, self.port = run, port
        self.folder = work / run.name
        self.log = out / f"{run.name}.log"
        self.traces = self.folder / "traces"
        environment = {
            **os.environ,
            **run.environment,
            "VLLM_PRE_AMPERE_EMULATE": run.capability,
            "VLLM_PRE_AMPERE_RANK_RECORD_DIR": str(self.folder / "ranks"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "VLLM_CACHE_ROOT": str(self.folder / "vllm"),
        }
        if run.reverts in ("baseline", "verification"):
            environment["EMULATED_SERVE_REVERT"] = run.reverts
            environment["PYTHONPATH"] = f"{_plugin(work)}:{environment.get('PYTHONPATH', '')}"
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(self.traces),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
            "delay_iterations": 12,
            "max_iterations": PROFILED_STEPS,
        }
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL)),
            *("--port", str(port), "--served-model-name", "model", "--max-num-seqs", "4"),
            *("--max-model-len", str(LENGTHS[-1] + TOKENS + 64), "--seed", "0"),
            *("--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.08"),
            *("--generation-config", "vllm", "--no-enable-prefix-caching"),
            *("--profiler-config", json.dumps(profiler)),
        ]
        if run.k:
            speculation = {"method": "mtp", "num_speculative_tokens": run.k}
            self.command += ["--speculative-config", json.dumps(speculation)]
        self.folder.mkdir(parents=True)
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_ready(self, deadline: float) -> float:
        """Seconds from the start until it answers.

        Raises:
            RuntimeError: it ended before, or `deadline` (monotonic) passed.
        """
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return time.monotonic() - self.started
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError("the server did not answer in time")

    def post(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        timeout = max(1.0, deadline - time.monotonic())
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} answered {error.code}: {error.read()[:500]!r}") from error
        return json.loads(text) if text.strip() else {}

    def generate(
        self, prompt: list[int], tokens: int, deadline: float, logprobs: int | None = None
    ) -> dict[str, Any]:
        """The "tokens", and with `logprobs` the logarithms of their chances."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": logprobs,
        }
        choice = self.post("/v1/completions", body, deadline)["choices"][0]
        answer = {"tokens": choice["token_ids"]}
        if logprobs is not None:
            answer["logprobs"] = [round(p, 5) for p in choice["logprobs"]["token_logprobs"]]
        return answer

    def metric(self, name: str) -> float | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            found = re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[0]) if found else None

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _plugin(work: Path) -> Path:
    """A folder from which Python sees the reverted fixes as an installed plug-in."""
    folder = work / "plugin"
    information = folder / "reverted_fix-0.dist-info"
    if not information.exists():
        information.mkdir(parents=True)
        for name in ("reverted_fix.py", "gating_kernel.py"):
            shutil.copy(_TESTS / name, folder / name)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: reverted-fix\nVersion: 0\n"
        )
        (information / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nreverted_fix = reverted_fix:register\n"
        )
    return folder


def prompts() -> list[list[int]]:
    """One prompt of each length, each with another beginning."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = tokenizer.encode(f"{_TEXT} ").ids
    made = []
    for index, length in enumerate(LENGTHS):
        head = tokenizer.encode(f"Chapter {index + 1}. ").ids
        made.append((head + text * (length // len(text) + 1))[:length])
    return made


def measure(server: Server, asked: list[list[int]], deadline: float) -> dict[str, Any]:
    """Everything one server is asked; a failure is recorded under "error", with the log's end."""
    program, *options = server.command
    command = " ".join([Path(program).name, *options]).replace(f"{_REPOSITORY}/", "")
    result: dict[str, Any] = {**asdict(server.run), "command": command}
    try:
        result["ready_after_s"] = round(server.wait_until_ready(deadline), 1)
        result["answers"] = [
            server.generate(prompt, TOKENS, deadline, logprobs=1) for prompt in asked
        ]
        result["generated_after_s"] = round(time.monotonic() - server.started, 1)
        if server.run.k:
            drafts = server.metric("vllm:spec_decode_num_drafts_total")
            accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
            if drafts and accepted is not None:
                result["acceptance_length"] = round(1 + accepted / drafts, 3)
        server.post("/start_profile", None, deadline)
        steps = (PROFILED_STEPS + 30) * (server.run.k + 1)
        server.generate(asked[2], steps, deadline)
        server.post("/stop_profile", None, deadline)
        (trace,) = server.traces.rglob("*.pt.trace.json*")
        result["trace"] = str(trace)
        result["finished_after_s"] = round(time.monotonic() - server.started, 1)
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        server.stop()
    log = server.log.read_text(errors="replace")
    result["auto_settings"] = len(set(re.findall(r"Auto-setting (VLLM_\w+=\S+)", log)))
    result["banner"] = "EMULATION, NOT A" in log
    result["ranks"] = [
        json.loads(path.read_text()) for path in sorted(server.folder.glob("ranks/rank*.json"))
    ]
    if "error" in result:
        result["log_end"] = log.splitlines()[-60:]
    return result


def refused_launches(out: Path, work: Path) -> list[dict[str, Any]]:
    """The first fix taken back: launches that ask for more than a block of the card has."""
    results = []
    for capability in ("7.5", "7.0"):
        environment = {
            **os.environ,
            "VLLM_PRE_AMPERE_EMULATE": capability,
            "TRITON_CACHE_DIR": str(work / f"launches-{capability}" / "triton"),
        }
        command = [sys.executable, str(_TESTS / "refused_launches.py")]
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        (out / f"launches-{capability}.log").write_text(answer.stdout + answer.stderr)
        lines = answer.stdout.strip().splitlines()
        if answer.returncode or not lines:
            results.append({"capability": capability, "error": answer.stderr[-3000:]})
        else:
            results.append(json.loads(lines[-1]))
    return results


def add_census(results: list[dict[str, Any]]) -> None:
    """Count what each run's trace holds; a trace that cannot be counted is that run's error."""
    from vllm.pre_ampere.census import own_triton_kernels, read_trace

    own = own_triton_kernels()
    for result in results:
        if "trace" not in result:
            continue
        try:
            result["census"] = read_trace(Path(result.pop("trace")), own).to_json()
        except ValueError as error:
            result |= {"error": f"census: {error}", "log_end": []}


def checks(results: list[dict[str, Any]], launches: list[dict[str, Any]]) -> dict[str, Any]:
    """What the runs have to show, each with the numbers it rests on."""
    by_name = {result["name"]: result for result in results}
    found: dict[str, Any] = {}
    for name in (run.name for run in RUNS if not run.reverts):
        found[f"{name} boots, emulated and with its banner"] = (
            "error" not in by_name[name]
            and by_name[name]["banner"]
            and by_name[name]["auto_settings"] == 9
        )
    for card in ("sm75", "sm70"):
        for mode, compared, label in (
            ("", ("tokens",), "k=3 equals k=0 at all 10 lengths"),
            (
                "-batch-invariant",
                ("tokens", "logprobs"),
                "batch-invariant, k=3 gives the tokens and log probabilities of k=0 at all 10 lengths",
            ),
        ):
            without, with_drafts = (
                by_name[f"{card}-k{k}{mode}"].get("answers", []) for k in (0, 3)
            )
            pairs = zip(without, with_drafts, strict=False)
            equal = [all(a[what] == b[what] for what in compared) for a, b in pairs]
            found[f"{card}: {label}"] = equal == [True] * len(LENGTHS)
    reverted = by_name["sm75-k3-without-baseline-fix"]
    found["without the baseline fix a Turing box gets no defaults"] = reverted["auto_settings"] == 0
    turing = next(launch for launch in launches if launch["capability"] == "7.5")
    message = turing.get("over", "")
    found["a launch over the limit fails with both numbers"] = (
        turing.get("right") is True and "65536" in message and str(turing.get("needed")) in message
    )
    found["flashqla_sm70 is refused with both numbers"] = all(
        number in turing.get("refusal", "") for number in ("86016", "65536")
    )
    elementwise, launched = {}, {}
    for name, result in by_name.items():
        # Where Triton multiplied, the trace does not show where a layer begins.
        if result.get("census", {}).get("gdn_layer"):
            layer = result["census"]["gdn_layer"]
            elementwise[name] = sum(n for kind, n in layer.items() if "elementwise" in kind)
            launched[name] = sum(layer.values())
    needed = {"sm75-k0", "sm75-k3", "sm75-k3-without-gate-fix", "sm75-k3-without-verification-fix"}
    found["every run on Turing was profiled"] = needed <= elementwise.keys()
    if needed <= elementwise.keys():
        speculative = elementwise["sm75-k3"]
        found["speculation adds no ATen elementwise launch to a GDN layer"] = (
            speculative <= elementwise["sm75-k0"]
        )
        inductor = {
            name: by_name[name]["census"]["gdn_layer"].get("Inductor-fused", 0.0)
            for name in ("sm75-k0", "sm75-k3")
        }
        found["the gated norm stays in Inductor's kernels with speculation"] = (
            inductor["sm75-k3"] >= inductor["sm75-k0"] > 0
        )
        found["the eager wrapper adds at least ten to a GDN layer"] = (
            elementwise["sm75-k3-without-gate-fix"] - speculative >= 10
        )
        found["two kernels in place of one add a launch to a GDN layer"] = (
            launched["sm75-k3-without-verification-fix"] > launched["sm75-k3"]
        )
    return {
        "passed": found,
        "elementwise_a_gdn_layer": elementwise,
        "launches_a_gdn_layer": launched,
    }


def judge(path: Path) -> int:
    """Add where k=3 left k=0 and whether by a tie, and draw what the two launch."""
    from float64_judge import Judge

    from vllm.pre_ampere.census import Census
    from vllm.pre_ampere.cli.census import draw

    result = json.loads(path.read_text())
    runs = {run["name"]: run for run in result["runs"]}
    asked = prompts()
    judging = Judge(MODEL)
    result |= checks(result["runs"], result["launches"])
    result["judged"] = {}
    for name, run in runs.items():
        if not run["k"]:
            continue
        card = name.split("-")[0]
        mode = "-batch-invariant" if name.endswith("-batch-invariant") else ""
        verdict = judging.judge(asked, runs[f"{card}-k0{mode}"]["answers"], run["answers"])
        result["judged"][name] = {**asdict(verdict), "only_ties": verdict.only_ties}
        # Of a run with a fix taken back nothing is promised.
        if not run["reverts"]:
            label = f"{name} differs from k=0 by rounding ties alone"
            result["passed"][label] = verdict.only_ties
    path.write_text(json.dumps(result, indent=1) + "\n")
    shown = {
        name: Census.from_json(runs[name]["census"])
        for name in ("sm75-k0", "sm75-k3", "sm75-k3-without-gate-fix")
    }
    draw(shown, path.with_suffix(".png"))
    print(json.dumps(result["judged"], indent=1))
    return 0 if all(verdict for name, verdict in result["passed"].items() if "ties" in name) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/emulated-serve"))
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--judge", type=Path, help="compare the tokens of a result in float64")
    parser.add_argument("--seconds", type=float, default=500, help="for everything together")
    parser.add_argument("--only", nargs="*", default=[], help="names of runs; all if left out")
    arguments = parser.parse_args()
    if arguments.judge:
        return judge(arguments.judge)
    deadline = time.monotonic() + arguments.seconds
    facts = provenance(arguments.commit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(arguments.work, ignore_errors=True)
    asked = prompts()
    runs = [run for run in RUNS if not arguments.only or run.name in arguments.only]
    servers = [
        Server(run, 8100 + index, arguments.out, arguments.work) for index, run in enumerate(runs)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(servers) + 1) as pool:
        launching = pool.submit(refused_launches, arguments.out, arguments.work)
        measuring = [pool.submit(measure, server, asked, deadline - 40) for server in servers]
        results = [future.result() for future in measuring]
        launches = launching.result()
    add_census(results)
    record = {
        "what": "vllm serve on a newer GPU that emulates Turing and Volta",
        **facts,
        "lengths": LENGTHS,
        "tokens": TOKENS,
        "runs": results,
        "launches": launches,
    }
    verdict: dict[str, Any] = {"passed": {}}
    if not arguments.only:
        verdict = checks(results, launches)
    record |= verdict
    (arguments.out / "emulated_serve.json").write_text(json.dumps(record, indent=1) + "\n")
    for result in results:
        print(summary(result))
    for name, passed in verdict["passed"].items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    return 0 if all(verdict["passed"].values()) else 1


def summary(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['name']}: {result['error']}\n  " + "\n  ".join(result["log_end"][-25:])
    census = result.get("census", {})
    classes = {kind: round(count[0], 1) for kind, count in census.get("classes", {}).items()}
    return (
        f"{result['name']}: ready after {result['ready_after_s']} s, done after "
        f"{result['finished_after_s']} s, {result['auto_settings']} defaults, acceptance length "
        f"{result.get('acceptance_length')}, launches a step {classes}, a GDN layer "
        f"{census.get('gdn_layer')}"
    )


if __name__ == "__main__":
    sys.exit(main())
