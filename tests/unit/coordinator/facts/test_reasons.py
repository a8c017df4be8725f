"""Reasons as values: their comparison, and a pure core that composes no text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarm_ft.coordinator
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.reasons import several
from swarm_ft.ids import RunId
from tests.reasons import reason

FOLDER = Path(swarm_ft.coordinator.__file__).parent
PURE = sorted(path for part in ("facts", "plan", "decide") for path in (FOLDER / part).glob("*.py"))
FIELDS = {"reason", "detail", "notice", "words", "why", "remedy", "failed", "misfits", "idle"}
"""Arguments and variables that hold reasons."""
OUTSIDE = {"text", "text_before"}
"""Fields of a reason that hold text from outside, which the core does not compose."""


# ---- what is compared


def test_a_limit_depends_on_kind_and_step_alone() -> None:
    first = reason(Kind.SAVES_BEFORE_LEAVE, "b", layers="2-4", step=3)
    assert first.wait == reason(Kind.SAVES_BEFORE_LEAVE, "c", "d", layers="0-2", step=3).wait
    assert first.wait != reason(Kind.SAVES_BEFORE_LEAVE, "b", layers="2-4", step=4).wait
    assert first.wait != reason(Kind.AWAITS_PAUSED, "b", layers="2-4", step=3).wait


def test_the_gist_has_neither_numbers_nor_texts_at_any_depth() -> None:
    cause = reason(Kind.PEER_ERROR, "b", code="internal", text="disk full", run_id=RunId("r"))
    expected = reason(Kind.FAILED_TOO_OFTEN, amount=3.0, value=2.5, num_more=1, parts=(cause,))
    bare = reason(Kind.PEER_ERROR, "b", code="internal", run_id=RunId("r"))
    assert expected.gist == reason(Kind.FAILED_TOO_OFTEN, parts=(bare,))


def test_one_of_several_is_itself() -> None:
    one, other = reason(Kind.LOADING), reason(Kind.EXPORTING)
    assert several([]) is several([None]) is None
    assert several([None, one]) is one
    assert several([one, other]) == reason(Kind.SEVERAL, parts=(one, other))


# ---- the pure core composes no text


def _is_composed(node: ast.AST) -> bool:
    """Whether an expression makes text: from a template, from pieces, or a sentence."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        return any(_is_text(side) for side in (node.left, node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("join", "format") and _is_text(node.func.value)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or _is_composed(node)


def _without_errors(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but docstrings, declared options, and messages of errors that are raised."""
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        is_option = isinstance(child, ast.Call) and _name_of(child.func) == "Option"
        if not (is_docstring or is_option or isinstance(child, (ast.Raise, ast.Assert))):
            yield child
            yield from _without_errors(child)


def _name_of(target: ast.AST) -> str:
    return target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")


def _values_of_reasons(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the values of all arguments and variables that hold a reason."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name), value=value) if name in FIELDS | OUTSIDE:
                yield value
            case ast.Assign(targets=targets, value=value):
                yield from [value] if FIELDS & set(map(_name_of, targets)) else []
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from [value] if _name_of(target) in FIELDS else []
            case ast.AugAssign(target=target, value=value) if _name_of(target) in FIELDS:
                yield value


def composed_texts(source: str) -> list[int]:
    """Return lines of a module's source that compose text for a reader.

    That is a sentence or a template anywhere but in an error that is raised; and any text at all
    where a reason is expected.
    """
    tree = ast.parse(source)
    sentences = [node for node in _without_errors(tree) if _is_composed(node)]
    for value in _values_of_reasons(tree):
        sentences += [node for node in ast.walk(value) if _is_composed(node)]
        sentences += [value] if isinstance(value, ast.Constant) and value.value else []
    return sorted({getattr(node, "lineno", 0) for node in sentences})


ALLOWED = {
    "decide/attempts.py": [
        'if cached.get("nothing to place") == waiting:',
        'cached["nothing to place"] = waiting',
    ],
    "facts/quotas.py": ['return f"{num_bytes / GIB:.2f} GiB"'],
    "facts/state.py": [
        'return self.claim.name or self.owner or f"run {self.run_id}"',
        'return self._from_runs("by peer", self._find_by_peer)',
    ],
    "plan/routes.py": ['return digest_of(f"place of {sample} by {seed}".encode())'],
    "plan/allocation.py": ['question = ("makes room", run.run_id, past.committed_steps,'],
    "plan/shared_memory.py": [
        'return hashlib.sha256(f"{hello.machine_key} at {address}".encode())'
    ],
    "plan/stage_keys.py": [
        'return derive_key(run_key, f"peer {peer_id}") if run_key else b""',
        'return {stage: derive_key(run_key, f"stage {stage}")',
    ],
}
"""Beginnings of lines that make names and keys which no reader sees, or a part of an error."""


@pytest.mark.parametrize("path", PURE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_pure_core_composes_no_text(path: Path) -> None:
    source = path.read_text()
    lines = [source.splitlines()[number - 1].strip() for number in composed_texts(source)]
    allowed = tuple(ALLOWED.get(f"{path.parent.name}/{path.name}", ()))
    assert [line for line in lines if not line.startswith(allowed)] == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('detail = f"peer {peer}"', True),
        ('detail = "gone"', True),
        ('f(reason="peer " + name)', True),
        ('f("; ".join(names))', True),
        ('f("no peer can host it")', True),
        ('raise ValueError(f"expected a step, got {step}")', False),
        ("f(reason=Reason(kind=ReasonKind.LOADING))", False),
        ("f(text=error.message)", False),
        ('f(text=f"{error}")', True),
        ('"""About peers that leave."""', False),
    ],
)
def test_composed_text_is_found(line: str, is_found: bool) -> None:
    assert bool(composed_texts(line)) == is_found


def test_every_pure_module_is_looked_at() -> None:
    assert len(PURE) > 30
