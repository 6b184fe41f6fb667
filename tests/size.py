"""Statements and lines of each package, by the syntax trees (`make size`)."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    statements: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    docs = total = 0
    for layer in ("kernels", "distlab", "experiments", "launch", "tests"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            package = "/".join(parts[:2]).removesuffix(".py") if layer == "distlab" else layer
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            statements[package] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
            lines[package] += len(text.splitlines())
            if layer != "tests":
                total += len(text.splitlines())
                docs += sum(
                    node.body[0].end_lineno - node.body[0].lineno + 1
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
                )
    for package in sorted(statements):
        print(f"{package:<24} {statements[package]:>7,} statements {lines[package]:>8,} lines")
    source = [package for package in statements if package != "tests"]
    print(f"{'source':<24} {sum(statements[p] for p in source):>7,} statements {total:>8,} lines, "
          f"{100 * docs / total:.0f} % of them docstrings")


if __name__ == "__main__":
    main()
