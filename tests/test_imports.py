"""Who may import whom, read from the source with ast, so that unused paths are checked as well."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCANNED = ("dspark_jax", "pallas_kernels", "tools")

# Lowest level first. A module imports from its own level and from those below it. Names are those
# of the modules and packages directly inside dspark_jax; "dspark_jax" stands for its __init__.py.
LEVELS = (
    ("pallas_kernels",),
    (
        "dspark_jax",
        "config",
        "config_deepseek",
        "config_deepseek_target",
        "types",
        "sharding",
        "layouts",
        "chips",
        "host_memory",
    ),
    (
        "products",
        "layers",
        "rope",
        "attention",
        "paged_attention",
        "moe",
        "packed",
        "hyper_connections",
        "sampling",
        "kv_cache",
        "checkpoint",
        "tokenizer",
    ),
    ("target", "draft"),
    ("schedule", "history", "pending", "verify", "acceptance", "calibrate", "sps"),
    ("state", "decode", "train"),
    ("engine", "eval", "simulate", "aot"),
    ("cli", "serve", "generate", "bench", "data", "__main__"),
    ("tools",),
)
RANK = {unit: rank for rank, units in enumerate(LEVELS) for unit in units}

LAYER_UNITS = {"layers", "rope", "attention", "paged_attention", "moe", "hyper_connections"}
MODEL_UNITS = {"target", "draft"}
LINEN_UNITS = (LAYER_UNITS | MODEL_UNITS) - {"rope", "paged_attention"}

# Barred although the levels would allow it: the two models meet only in what they are handed, and
# the rules of a round work on arrays, whatever model those came from.
BARRED = {
    "target": {"draft"},
    "draft": {"target"},
    "schedule": LAYER_UNITS | MODEL_UNITS,
    "history": LAYER_UNITS | MODEL_UNITS,
    "pending": LAYER_UNITS | MODEL_UNITS,
    "verify": LAYER_UNITS | MODEL_UNITS,
    "calibrate": LAYER_UNITS | MODEL_UNITS,
    "sps": LAYER_UNITS | MODEL_UNITS,
}
BANNED_PACKAGES = {"torch", "transformers", "tests"}


def _unit_of_file(path: Path) -> str:
    """`dspark_jax/target/llama.py` is `target`, any `__main__.py` a front end of its own."""
    parts = path.with_suffix("").parts
    if parts[0] != "dspark_jax":
        return parts[0]
    if parts[-1] == "__main__":
        return "__main__"
    return "dspark_jax" if parts[1].startswith("__") else parts[1]


def _unit_of_name(name: str) -> str | None:
    """The unit a dotted name is part of; None for names from outside the project."""
    parts = name.split(".")
    if parts[0] not in SCANNED:
        return None
    if parts[0] == "dspark_jax" and len(parts) > 1 and parts[1] in RANK:
        return parts[1]
    return parts[0]


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an attribute chain that starts at a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return f"{head}.{node.attr}"
    return None


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, or reached through `jax.` or `flax.`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name and name.split(".")[0] in ("jax", "flax"):
                yield node.lineno, name


def _is_private_jax(name: str) -> bool:
    head, *rest = name.split(".")
    return head in ("jax", "jaxlib") and any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )


def _complaint(unit: str, name: str) -> str | None:
    """What is wrong with `name` in a file of `unit`, or None."""
    if name.startswith("."):
        return "relative import; write the absolute one"
    if name.split(".")[0] in BANNED_PACKAGES:
        return f"imports {name.split('.')[0]}, which this project does without"
    if _is_private_jax(name):
        return "uses a private part of JAX"
    if f"{name}.".startswith("flax.linen.") and unit not in LINEN_UNITS:
        return "uses flax.linen outside the layer and model files"
    other = _unit_of_name(name)
    if other is None:
        return None
    if RANK[other] > RANK[unit]:
        return f"{unit} (level {RANK[unit]}) imports {name} (level {RANK[other]}), which is above"
    if other in BARRED.get(unit, ()):
        return f"{unit} must not import {other}"
    return None


def find_violations(root: Path) -> list[str]:
    """One line `file:line: reason` for each import under `root` that breaks a rule."""
    found = set()
    for path in (path for folder in SCANNED for path in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        unit = _unit_of_file(relative)
        if unit not in RANK:
            found.add(f"{relative.as_posix()}: '{unit}' has no level; add it to LEVELS")
            continue
        for line, name in _names(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if reason := _complaint(unit, name):
                found.add(f"{relative.as_posix()}:{line}: {reason}")
    return sorted(found)


def test_project_keeps_its_import_rules():
    assert (ROOT / "dspark_jax/__init__.py").is_file(), "nothing to scan"
    violations = find_violations(ROOT)
    assert not violations, "\n" + "\n".join(violations)


def _plant(root: Path, path: str, source: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")


PLANTED = {
    "upward": ("dspark_jax/layers.py", "from dspark_jax.target import llama", "is above"),
    "upward_from_package": ("dspark_jax/config.py", "from dspark_jax import engine", "is above"),
    "upward_in_function": (
        "dspark_jax/engine/loop.py",
        "def f():\n    import dspark_jax.serve.http",
        "is above",
    ),
    "tools_from_front_end": ("dspark_jax/bench.py", "import tools.profile_sps", "is above"),
    "kernel_to_project": (
        "pallas_kernels/gather/ops.py",
        "from dspark_jax.config import DraftConfig",
        "is above",
    ),
    "target_to_draft": (
        "dspark_jax/target/llama.py",
        "from dspark_jax.draft.markov import bias",
        "target must not import draft",
    ),
    "draft_to_target": (
        "dspark_jax/draft/dense.py",
        "from dspark_jax import target",
        "draft must not import target",
    ),
    "model_in_scheduler": (
        "dspark_jax/schedule.py",
        "from dspark_jax.draft.propose import Block",
        "schedule must not import draft",
    ),
    "relative": ("dspark_jax/target/llama.py", "from .base import Target", "relative import"),
    "private_import": ("dspark_jax/layers.py", "from jax._src import core", "private part"),
    "private_attribute": ("tools/aot.py", "import jax\nx = jax._src.core.Var", "private part"),
    "linen_import": ("dspark_jax/decode.py", "import flax.linen as nn", "flax.linen outside"),
    "linen_from": ("dspark_jax/train/step.py", "from flax import linen", "flax.linen outside"),
    "linen_attribute": ("tools/x.py", "import flax\ny = flax.linen.Dense", "flax.linen outside"),
    "torch": ("tools/convert.py", "import torch.nn", "imports torch"),
    "transformers": ("dspark_jax/data.py", "from transformers import X", "imports transformers"),
    "unknown_module": ("dspark_jax/misc/io.py", "", "'misc' has no level; add it to LEVELS"),
}


@pytest.mark.parametrize(("path", "source", "reason"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_violation_is_found_in_its_file(tmp_path, path, source, reason):
    _plant(tmp_path, path, source)
    violations = find_violations(tmp_path)
    assert violations
    assert all(line.startswith(path) and reason in line for line in violations), violations


def test_permitted_imports_pass(tmp_path):
    _plant(tmp_path, "pallas_kernels/gather/ops.py", "from pallas_kernels.gather import ref")
    _plant(tmp_path, "dspark_jax/types.py", "from dspark_jax.config import DraftConfig")
    _plant(tmp_path, "dspark_jax/attention.py", "import pallas_kernels\nfrom flax import linen")
    _plant(tmp_path, "dspark_jax/target/llama.py", "import flax.linen as nn\nimport jax\njax.jit")
    _plant(tmp_path, "dspark_jax/schedule.py", "from dspark_jax.sampling import warp")
    _plant(tmp_path, "dspark_jax/decode.py", "from dspark_jax import draft, target, verify")
    _plant(tmp_path, "dspark_jax/serve/__main__.py", "from dspark_jax import __version__, engine")
    _plant(tmp_path, "tools/bench.py", "import dspark_jax\nfrom dspark_jax import bench")
    assert find_violations(tmp_path) == []
