"""How often the loops of a compiled program run."""

from collections.abc import Mapping

from dspark_jax.aot.hlo import Computation, Instruction

_THROUGH = ("bitcast", "copy", "convert")


def trip_count(
    computations: Mapping[str, Computation], around: Computation, loop: Instruction
) -> int | None:
    """Runs of a `while` that counts from a constant to a constant in steps of one.

    Args:
      computations: of the program.
      around: where the loop stands.
      loop: the `while`.

    Returns:
      The number; None where a bound is known at run time only.
    """
    condition = computations[loop.called["condition"]]
    root, names = condition.root, None
    if root.opcode == "fusion":
        fused = computations[root.called["calls"]]
        names = {fused.parameters[n].name: o for n, o in enumerate(root.operands)}
        root, inner = fused.root, fused
    else:
        inner = condition
    if root.opcode != "compare":
        return None
    direction = root.attribute("direction")
    left, right = (_value(inner, condition, names, o, around, loop) for o in root.operands)
    start, limit = (left, right) if direction in ("LT", "LE", "NE") else (right, left)
    if start is None or limit is None:
        return None
    return max(limit - start + (direction in ("LE", "GE")), 0)


def _value(
    inner: Computation,
    condition: Computation,
    names: Mapping[str, str] | None,
    operand: str,
    around: Computation,
    loop: Instruction,
) -> int | None:
    """A bound, or the first value of the counter, as an integer."""
    found = inner.instructions[operand]
    while found.opcode in _THROUGH:
        found = inner.instructions[found.operands[0]]
    if found.opcode == "parameter" and names is not None:
        return _value(condition, condition, None, names[found.name], around, loop)
    if found.opcode == "get-tuple-element":
        index = int(found.attribute("index"))
        initial = around.instructions.get(loop.operands[0])
        if initial is None or initial.opcode != "tuple":
            return None
        return _constant(around, initial.operands[index])
    return _constant(inner, operand)


def _constant(computation: Computation, operand: str) -> int | None:
    found = computation.instructions.get(operand)
    while found is not None and found.opcode in _THROUGH:
        found = computation.instructions.get(found.operands[0])
    if found is None or found.opcode != "constant":
        return None
    text = found.rest.split(")")[0]
    return int(text) if text.lstrip("-").isdigit() else None
