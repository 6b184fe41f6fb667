"""Hooks of mkdocs: pages from README and the like, the reference, links to sources, and a search
that works offline.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Public names: people's scripts and submissions import these.
REFERENCE = {
    "distlab.parallel": "ParallelModel DataParallel NaiveDDP FlatDDP OverlapDDP BucketedDDP "
    "CopyEngineDDP FSDP LocalOptimizer ShardedOptimizer ZeroOptimizer",
    "distlab.comm": "RankContext rank_context",
    "distlab.testing": "check_gradients run_ranks",
    "distlab.experiment": "Experiment",
    "kernels.flash_attention": (
        "FlashAttention2 FlashAttention2PyTorch document_bounds flash_attention"
    ),
    **{
        f"kernels.{name}": ""
        for name in (
            "rmsnorm",
            "layernorm",
            "softmax",
            "swiglu",
            "rope",
            "matmul",
            "dropout",
            "cross_entropy",
            "adamw",
            "linear_cross_entropy",
            "nn",
        )
    },
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie under docs/."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(
            File.generated(
                config, target, content=_relinked(text, ROOT / source, target, config, files)
            )
        )
    for name, text in _reference().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository's pages become links of the site."""
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, Path(page.file.abs_src_path), page.file.src_uri, config, files)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme would fetch what lets the search run without a server; ours lies in assets/."""
    worker = posixpath.relpath("assets/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return re.sub(
        r'<script src="https://unpkg\.com/iframe-worker/shim"', f'<script src="{worker}"', output
    )


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same on the page of errors."""
    return output_content.replace("https://unpkg.com/iframe-worker/shim", "assets/worker.js")


def _reference() -> dict[str, str]:
    """A page for each package: methods that classes inherit stand with the base class alone."""
    pages: dict[str, list[str]] = {}
    for module, names in REFERENCE.items():
        package = module.removeprefix("distlab.").partition(".")[0]
        lines = pages.setdefault(f"reference/{package}.md", [f"# Reference: {package}"])
        lines += [f"::: {module}.{name}" for name in names.split()] or [f"::: {module}"]
    return {page: "\n\n".join(lines) + "\n" for page, lines in pages.items()}


def _relinked(markdown: str, source: Path, page: str, config: MkDocsConfig, files: Files) -> str:
    def address(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath(source.parent / match[2]))
        if str(path.relative_to(ROOT)) in PAGES:
            target = PAGES[str(path.relative_to(ROOT))]
        elif path.is_relative_to(ROOT / "docs"):
            target = path.relative_to(ROOT / "docs").as_posix()
        else:
            path = path / "__init__.py" if path.is_dir() else path
            target = f"source/{path.relative_to(ROOT)}.txt"  # text, which a browser shows
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(path)))
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(page) or '.')}{match[3]}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(address, part) for part in parts)
