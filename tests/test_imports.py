"""The rooms' walls: imports point down only, third-party libraries stay in their rooms, start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"types", "config", "errors", "garbage", "log", "metrics"}
ENGINE_SIDE = {
    "scheduling",
    "text",
    "modelfiles",
    "weights",
    "quant",
    "attention",
    "layers",
    "models",
    "runner",
    "engine",
}

# room -> (rooms it may import, third-party libraries it may import at module level or inside functions)
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "types": (BASE, set()),
    "config": (BASE, set()),
    "errors": (BASE, set()),
    "garbage": (BASE, set()),
    "log": (BASE, set()),
    "metrics": (BASE, set()),
    "scheduling": (BASE, set()),
    "modelfiles": (BASE, {"gguf", "huggingface_hub", "numpy"}),
    "arithmetic": (BASE | {"modelfiles", "kernels"}, set()),
    "cost": (BASE, set()),
    "text": (BASE | {"modelfiles"}, {"tokenizers", "jinja2"}),
    "data": (BASE, {"pyarrow", "fsspec", "datasets", "numpy", "zstandard"}),
    "job": (
        BASE | {"data", "text", "modelfiles", "arithmetic", "cost"},
        {"pydantic", "pydantic_core", "yaml", "numpy"},
    ),
    "weights": (BASE | {"modelfiles"}, {"torch", "safetensors", "gguf", "numpy"}),
    "quant": (BASE | {"kernels", "weights", "modelfiles"}, {"torch"}),
    "attention": (BASE | {"kernels"}, {"torch", "numpy"}),
    "layers": (BASE | {"kernels", "quant", "attention", "weights", "modelfiles"}, {"torch"}),
    "models": (BASE | {"arithmetic", "kernels", "quant", "attention", "layers", "weights", "modelfiles"}, {"torch"}),
    "runner": (
        BASE | {"arithmetic", "cost", "kernels", "quant", "attention", "layers", "models", "weights", "modelfiles"},
        {"torch", "numpy"},
    ),
    "engine": (BASE | {"scheduling", "runner", "text", "modelfiles", "models", "kernels"}, set()),
    "cluster": (
        BASE | {"engine", "scheduling", "job", "data", "text", "modelfiles", "arithmetic", "kernels"},
        {"dask", "distributed", "numpy", "pyarrow", "psutil"},
    ),
    "cli": (BASE | {"cluster", "job", "data", "modelfiles", "arithmetic", "cost", "text"}, {"click", "rich"}),
}
KERNELS: set[str] = {"torch", "numpy", "triton"}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Names imported by a file, and the line. Imports for type checking only count as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno
            if node.module == "batchinfer":
                yield from ((f"batchinfer.{alias.name}", node.lineno) for alias in node.names)


def complaints(room: str, files: list[Path], rooms: set[str], libraries: set[str]) -> list[str]:
    found = []
    for path in files:
        for name, line in imports(path):
            parts = name.split(".")
            where = f"{path.relative_to(ROOT)}:{line}"
            if parts[0] == "batchinfer":
                target = parts[1] if len(parts) > 1 else ""
                if target and target != "__version__" and target != room and target not in rooms:
                    found.append(f"{where}: {room} must not import batchinfer.{target}")
            elif parts[0] == "batchinfer_kernels":
                if "kernels" not in rooms:
                    found.append(f"{where}: {room} must not import batchinfer_kernels")
            elif parts[0] not in sys.stdlib_module_names and parts[0] not in libraries:
                found.append(f"{where}: {room} must not import {parts[0]}")
    return found


def files_of(room: str) -> list[Path]:
    single = ROOT / "batchinfer" / f"{room}.py"
    return [single] if single.exists() else sorted((ROOT / "batchinfer" / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_lies_below(room: str) -> None:
    rooms, libraries = ROOMS[room]
    assert complaints(room, files_of(room), rooms, libraries) == []


def test_kernels_know_nothing_of_batchinfer() -> None:
    files = sorted((ROOT / "kernels" / "batchinfer_kernels").rglob("*.py"))
    assert files
    assert complaints("kernels", files, {"kernels"}, KERNELS) == []
    outside = [p for p in files if "triton" not in p.relative_to(ROOT).parts[2:]]
    assert [p for p in outside if any(n.split(".")[0] == "triton" for n, _ in imports(p))] == []


def test_every_room_has_a_rule() -> None:
    found = {p.stem if p.is_file() else p.name for p in (ROOT / "batchinfer").iterdir()}
    found -= {"__init__", "__main__", "__pycache__", "py", "README", "testing"}
    assert found <= set(ROOMS), f"add a rule for {sorted(found - set(ROOMS))}"


def loaded_after(code: str) -> set[str]:
    program = f"{code}\nimport sys; print(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_importing_the_package_is_light() -> None:
    heavy = {"torch", "dask", "distributed", "pyarrow", "pydantic", "numpy", "transformers"}
    assert not loaded_after("import batchinfer") & heavy
    assert not loaded_after("import batchinfer.cli.main") & heavy


def test_engines_of_jobs_start_with_little() -> None:
    """What they import stands between Enter and the first token."""
    modules = "import batchinfer.cluster.engine_process, batchinfer.cluster.row_feed, batchinfer.job.frozen_job"
    program = f"{modules}\nimport sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    heavy = {
        "dask",
        "distributed",
        "datasets",
        "pydantic",
        "fsspec",
        "pyarrow.compute",
        "pyarrow.parquet",
        "pyarrow.fs",
    }
    assert "pyarrow.ipc" in loaded and not loaded & heavy


def test_the_engine_side_needs_few_libraries() -> None:
    absent = ("dask", "distributed", "datasets", "pydantic", "yaml", "pyarrow", "click", "rich", "fsspec")
    program = f"import sys\nfor m in {absent}:\n    sys.modules[m] = None\n"
    program += "import batchinfer.engine.llm, batchinfer.runner.local, batchinfer.models.registry"
    assert "torch" in loaded_after(program)
