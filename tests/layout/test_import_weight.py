"""What an import may cost: nothing for the package, no torch for schemas, nothing optional."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_AT_MODULE_LEVEL = {"torch", "lightning", "omegaconf", "numpy", "nemo_like"}
LIBRARY = sorted(
    it for folder in ("nemo_like", "collections") for it in (ROOT / folder).rglob("*.py")
)
CONFIGS = sorted(it for it in LIBRARY if it.name == "config.py")
DOMAIN_MODULES = sorted(it for it in LIBRARY if it.is_relative_to(ROOT / "collections"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "collections":
        parts.insert(0, "nemo_like")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is imported, wherever they stand."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from module_level(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from module_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from module_level(handler.body)


def test_importing_the_package_loads_no_third_party() -> None:
    loaded = run_python(
        "import sys; before = set(sys.modules); import nemo_like; "
        "print(*{it.split('.')[0] for it in set(sys.modules) - before})"
    ).split()
    assert set(loaded) - sys.stdlib_module_names == {"nemo_like"}


def test_modules_import_only_the_four_third_parties_at_their_top() -> None:
    found = []
    for path in LIBRARY:
        for node in module_level(ast.parse(path.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                names = [it.name for it in node.names]
            else:
                names = [] if node.level else [node.module or ""]
            tops = {it.split(".")[0] for it in names}
            wrong = tops - ALLOWED_AT_MODULE_LEVEL - sys.stdlib_module_names
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {it}" for it in sorted(wrong)]
    assert found == []


def test_schemas_load_no_torch() -> None:
    assert CONFIGS
    heavy = run_python(
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
        "print(json.dumps(sorted({it.split('.')[0] for it in sys.modules})))",
        *map(module_name, CONFIGS),
    )
    assert "nemo_like" in json.loads(heavy)


def test_command_line_loads_no_torch() -> None:
    loaded = run_python("import sys, nemo_like.cli.main; print(*sys.modules)").split()
    assert {"torch", "lightning", "numpy", "hydra", "transformers"} & set(loaded) == set()


def test_domains_load_what_lightning_loads_and_nothing_more() -> None:
    """Lightning may bring scipy or transformers where they are installed; our modules add none."""
    added = run_python(
        "import sys, importlib, lightning.pytorch, omegaconf, torch.distributed\n"
        "before = {it.split('.')[0] for it in sys.modules}\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print(*{it.split('.')[0] for it in sys.modules} - before)",
        *map(module_name, DOMAIN_MODULES),
    ).split()
    assert set(added) - sys.stdlib_module_names == {"nemo_like"}
