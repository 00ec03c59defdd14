"""Functions with a docstring: what a benchmark prompt is a head of, and what the target learns to finish."""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """Holds the source text of one top-level function. `head` is its beginning, up to and with the newline
    after the docstring's closing quotes."""

    name: str
    head: str
    text: str


def documented_functions(module: str) -> Iterator[Function]:
    """Yields the top-level functions of a module's source that have a docstring, a short head and a body
    of 2 to 40 lines, in file order. Raises SyntaxError where it does not parse."""
    lines = module.splitlines(keepends=True)
    for node in ast.parse(module).body:
        if isinstance(node, _FunctionNode) and (end := _end_of_head(node)) is not None:
            first = node.lineno - 1
            head, text = "".join(lines[first:end]), "".join(lines[first : node.end_lineno])
            if len(head) <= 1000:
                yield Function(node.name, head, text)


def _end_of_head(node: _FunctionNode) -> int | None:
    docstring = node.body[0]
    if ast.get_docstring(node) is None or len(node.body) < 2 or node.decorator_list:
        return None
    assert docstring.end_lineno is not None and node.end_lineno is not None, "parsed from source"
    num_head, num_body = docstring.end_lineno - node.lineno + 1, node.end_lineno - docstring.end_lineno
    return docstring.end_lineno if num_head <= 24 and 2 <= num_body <= 40 else None


def first_function(completion: str) -> str:
    """Returns the rest of the function whose head the prompt was: up to the first line of code at column
    0."""
    lines = completion.split("\n")
    ends = (index for index, line in enumerate(lines) if line.strip() and line[0] not in " \t#")
    return "\n".join(lines[: next(ends, len(lines))])


def is_python(prompt: str, function: str) -> bool:
    """Returns whether prompt and function parse together. A function without a line of code after the
    prompt does not count, though the prompt's docstring alone would parse."""
    if all(not line.strip() or line.lstrip().startswith("#") for line in function.split("\n")):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(prompt + function)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
