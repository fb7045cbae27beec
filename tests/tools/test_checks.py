# SPDX-License-Identifier: Apache-2.0
"""Each check of `make lint` that is our own finds what it is there to find, and nothing else."""

import subprocess
import sys
from pathlib import Path

import check
import pytest
from checks import device_calls, environment_variables

REPOSITORY = Path(__file__).parents[2]
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
OURS = "vllm/pre_ampere"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository, which is the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(name: str, files: dict[str, str]) -> list[str]:
    """Write the files, run one check on those of Python and C++, and say what it finds."""
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    looked_at = [Path(path) for path in files if not path.endswith(".md")]
    return [str(finding) for finding in sorted(check.CHECKS[name](looked_at))]


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        ("a.py", '"""Says what it is for."""\n', 1),
        ("a.py", "", 1),
        ("a.sh", "#!/usr/bin/env bash\nset -e\n", 2),
        ("a.py", LICENCE.replace("Apache-2.0", "MIT"), 1),
        ("csrc/a.cu", LICENCE, 1),
    ],
)
def test_missing_licence_is_found(tree: Path, path: str, text: str, line: int) -> None:
    (finding,) = found("spdx-header", {path: text})
    assert finding.startswith(f"{path}:{line}: this line must be ")


def test_licence_is_recognised(tree: Path) -> None:
    files = {
        "a.py": LICENCE,
        "a.sh": f"#!/bin/sh\n{LICENCE}",
        "csrc/a.cu": LICENCE.replace("#", "//"),
    }
    assert found("spdx-header", files) == []


def test_long_file_is_found(tree: Path) -> None:
    files = {"long.py": "x = 1\n" * 501, "fits.py": "x = 1\n" * 500}
    assert found("file-length", files) == [
        "long.py:501: 501 lines, at most 500: split it by what it does"
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle\n", "pickle"),
        ("import json, cloudpickle as cp\n", "cloudpickle"),
        ("from dill.source import x\n", "dill.source"),
        ("def f(path):\n    return torch.load(path)\n", "torch.load"),
        ("from torch import load\n", "torch.load"),
        ("reader = np.load\n", "np.load"),
    ],
)
def test_pickles_are_found(tree: Path, text: str, name: str) -> None:
    (finding,) = found("serialization", {"a.py": text})
    assert f" {name} can run code from the file that it reads" in finding


def test_other_readers_are_left_alone(tree: Path) -> None:
    text = (
        "import json\nfrom torch import Tensor\njson.load(file)\nsafetensors.torch.load_file(x)\n"
    )
    assert found("serialization", {"a.py": text}) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x = torch.cuda.get_device_capability(0)\n", "torch.cuda.get_device_capability"),
        ("ask = torch.cuda.current_device\n", "torch.cuda.current_device"),
        ("import torch.cuda\n", "torch.cuda"),
        ("from torch import cuda\n", "torch.cuda"),
        ("from torch.cuda import device_count\n", "torch.cuda"),
    ],
)
def test_device_calls_are_found(tree: Path, text: str, name: str) -> None:
    (finding,) = found("device-calls", {"a.py": text})
    assert finding.startswith(f"a.py:1: {name}: ask torch.accelerator")


def test_asking_the_accelerator_and_capturing_graphs_is_right(tree: Path) -> None:
    text = "torch.accelerator.current_device_index()\nwith torch.cuda.graph(graph):\n    pass\n"
    assert found("device-calls", {"a.py": text}) == []


def test_permission_holds_in_its_function_alone(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_calls, "ALLOWED", {("a.py", "Card.name"): "", ("a.py", "gone"): ""})
    text = (
        "class Card:\n"
        "    def name(self):\n        return lambda: torch.cuda.get_device_name()\n"
        "    def names(self):\n        return torch.cuda.device_count()\n"
    )
    unused, forbidden = found("device-calls", {"a.py": text})
    assert unused == "a.py:1: gone no longer uses torch.cuda: remove it from ALLOWED"
    assert forbidden.startswith("a.py:5: torch.cuda.device_count")


TABLE = 'A = Variable("VLLM_SM70_A", str, "What it does.")\nB = Variable("B", str, "Another.")\n'
DOCUMENT = "| variable | what |\n| --- | --- |\n| `VLLM_SM70_A` | a |\n| `B` | b |\n"


def environment_findings(text: str, table: str = TABLE, document: str = DOCUMENT) -> list[str]:
    files = {
        f"{OURS}/a.py": text,
        f"{OURS}/environment.py": table,
        "docs/environment.md": document,
    }
    return found("environment-variables", files)


@pytest.mark.parametrize(
    "text",
    [
        'x = os.environ["A"]\n',
        'x = os.getenv("A")\n',
        "from os import environ\n",
        'os.putenv("A", "1")\n',
    ],
)
def test_reading_the_environment_elsewhere_is_found(tree: Path, text: str) -> None:
    (finding,) = environment_findings(text)
    assert (
        finding == f"{OURS}/a.py:1: ask the environment through a Variable of {OURS}/environment.py"
    )


def test_spelling_a_variable_elsewhere_is_found(tree: Path) -> None:
    (finding,) = environment_findings('names = ["VLLM_SM70_A"]\n')
    assert finding == f"{OURS}/a.py:1: take the name VLLM_SM70_A from {OURS}/environment.py"


def test_documentation_follows_the_table(tree: Path) -> None:
    text = '"""The docstring may speak of VLLM_SM70_A."""\nx = environment.A.get()\n'
    assert environment_findings(text) == []
    (missing,) = environment_findings(text, document=DOCUMENT.replace("`B`", "B"))
    assert missing == f"{OURS}/environment.py:2: B has no row in docs/environment.md"
    (left_over,) = environment_findings(text, table=TABLE.splitlines()[0])
    assert left_over == f"docs/environment.md:4: B is not in {OURS}/environment.py"


def test_permission_to_look_at_the_environment_must_be_used(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_variables, "ALLOWED", {(f"{OURS}/a.py", "start"): ""})
    assert environment_findings("def start():\n    run(env=os.environ)\n") == []
    (finding,) = environment_findings("def start():\n    run()\n")
    assert finding == f"{OURS}/a.py:1: start no longer looks at it: remove it from ALLOWED"


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("devices", "import vllm\n", "must run without vLLM; it may not import vllm"),
        ("kernels/reference/chunk", "from vllm.logger import x\n", "must run without vLLM"),
        ("kernels/triton/turing_mma", "def f():\n    import vllm.envs\n", "must run without vLLM"),
        ("devices", "from vllm.pre_ampere import environment\n", "may not import"),
        ("environment", "from vllm.pre_ampere.baseline import apply\n", "may not import"),
        ("kernels/registry", "from vllm.pre_ampere.gdn import core\n", "may not import"),
        ("gdn/core", "import vllm.pre_ampere.platform.hooks\n", "may not import"),
        ("platform/hooks", "from vllm.pre_ampere import register\n", "may not import"),
        ("preflight/card", "from vllm.pre_ampere.cli import main\n", "may not import"),
        ("gdn/core", "import tests.conftest\n", "no part of it"),
        ("gdn/core", "from engine_process import serve\n", "no part of it"),
        ("gdn/core", "from checks import parse\n", "no part of it"),
        ("attic/core", "import os\n", "has no row in ROOMS"),
    ],
)
def test_imports_against_the_table_are_found(
    tree: Path, module: str, text: str, complaint: str
) -> None:
    for path in ("tests/engine_process.py", "tools/checks/__init__.py"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    names = ("devices", "environment", "baseline", "gdn/core", "platform/hooks", "cli/__init__")
    product = {f"{OURS}/{name}.py": "" for name in names}
    (finding,) = found("imports", product | {f"{OURS}/{module}.py": text})
    assert finding.startswith(f"{OURS}/{module}.py:{text.count(chr(10))}: ")
    assert complaint in finding


def test_imports_down_the_house_are_right(tree: Path) -> None:
    files = {
        "devices.py": "import torch\n",
        "environment.py": "from vllm.pre_ampere.devices import Capability\n",
        "kernels/reference/chunk.py": "from vllm.pre_ampere.kernels.reference import gating\n",
        "kernels/reference/gating.py": "",
        "gdn/core.py": "import vllm\nfrom vllm.pre_ampere import devices, environment\n",
        "cli/doctor.py": "from vllm.pre_ampere.gdn import core\n",
    }
    assert found("imports", {f"{OURS}/{path}": text for path, text in files.items()}) == []


def test_circle_is_found(tree: Path) -> None:
    files = {
        f"{OURS}/gdn/a.py": "from vllm.pre_ampere.gdn import b\n",
        f"{OURS}/gdn/b.py": "def f():\n    from vllm.pre_ampere.gdn.a import x\n",
    }
    (finding,) = found("imports", files)
    assert ":1: a circle of imports: vllm.pre_ampere.gdn." in finding


def test_command_ends_1_where_something_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\n")

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "tools/check.py", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run("serialization", "tools/check.py") == (0, "")
    status, output = run("serialization", str(bad))
    assert status == 1
    assert output.startswith(f"{bad}:1: pickle ")
    status, output = run("spelling")
    assert status == 2
    assert "spdx-header" in output


def test_mypy_checks_the_product(tmp_path: Path) -> None:
    """`vllm` is an installed package that is skipped; our part of it is not: it sees this error."""
    original = REPOSITORY / OURS / "devices.py"
    planted = tmp_path / "devices.py"
    planted.write_text(original.read_text() + "\nplanted: str = any_pre_ampere(())\n")
    # Not incremental: the cache does not know of the planted file.
    shadow = ["--no-incremental", "--shadow-file", f"{OURS}/devices.py", str(planted)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *shadow], cwd=REPOSITORY, capture_output=True, text=True
    )
    line = len(planted.read_text().splitlines())
    assert f"{OURS}/devices.py:{line}: error: Incompatible types in assignment" in done.stdout
    assert done.returncode == 1
