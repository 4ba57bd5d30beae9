"""Caps on the length of files and functions, and a docstring on everything public.

A failure lists each place with its number. Split where the meaning splits: a cap is not raised.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCANNED = ("dspark_jax", "pallas_kernels", "tools")

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150  # functions in pallas_kernels/*/kernel.py

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _function_cap(path: Path) -> int:
    is_kernel = path.parts[0] == "pallas_kernels" and path.name == "kernel.py"
    return MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES


def _check_file(path: Path, text: str) -> list[str]:
    """Complaints about one file; `path` is relative to the root."""
    name = path.as_posix()
    found = []
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        found.append(f"{name}: {lines} lines, the cap is {MAX_FILE_LINES}")
    tree = ast.parse(text, name)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            lines = node.end_lineno - node.lineno + 1
            if lines > _function_cap(path):
                where = f"{name}:{node.lineno}: {node.name}"
                found.append(f"{where} has {lines} lines, the cap is {_function_cap(path)}")
    for node in tree.body:
        is_public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != "_"
        if is_public and not ast.get_docstring(node):
            found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
    return found


def find_violations(root: Path) -> list[str]:
    """One line for each file, function or docstring under `root` that breaks a rule."""
    paths = sorted(path for folder in SCANNED for path in (root / folder).rglob("*.py"))
    return [
        complaint
        for path in paths
        for complaint in _check_file(path.relative_to(root), path.read_text(encoding="utf-8"))
    ]


def test_project_keeps_its_budget():
    assert (ROOT / "dspark_jax/__init__.py").is_file(), "nothing to scan"
    violations = find_violations(ROOT)
    assert not violations, "\n" + "\n".join(violations)


def _write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _function(name: str, lines: int) -> str:
    """Source of a documented function of so many lines."""
    return f'def {name}():\n    """Says one."""\n' + "    x = 1\n" * (lines - 2)


def test_limits_are_inclusive(tmp_path):
    _write(tmp_path, "dspark_jax/long.py", "x = 1\n" * 450)
    _write(tmp_path, "dspark_jax/decode.py", _function("run", 80))
    _write(tmp_path, "pallas_kernels/gather/kernel.py", _function("body", 150))
    _write(tmp_path, "tools/main.py", "def _hidden():\n    pass\n")
    assert find_violations(tmp_path) == []


def test_each_breach_is_named_with_its_number(tmp_path):
    method = "".join(f"    {line}\n" for line in _function("run", 81).splitlines())
    _write(tmp_path, "dspark_jax/engine/loop.py", f'class Loop:\n    """Runs."""\n{method}')
    _write(tmp_path, "dspark_jax/long.py", "x = 1\n" * 451)
    _write(tmp_path, "dspark_jax/plain.py", "class Plain:\n    pass\n\nasync def go(): ...\n")
    _write(tmp_path, "pallas_kernels/gather/kernel.py", _function("body", 151))
    _write(tmp_path, "pallas_kernels/gather/ops.py", _function("gather", 81))
    assert find_violations(tmp_path) == [
        "dspark_jax/engine/loop.py:3: run has 81 lines, the cap is 80",
        "dspark_jax/long.py: 451 lines, the cap is 450",
        "dspark_jax/plain.py:1: Plain has no docstring",
        "dspark_jax/plain.py:4: go has no docstring",
        "pallas_kernels/gather/kernel.py:1: body has 151 lines, the cap is 150",
        "pallas_kernels/gather/ops.py:1: gather has 81 lines, the cap is 80",
    ]
