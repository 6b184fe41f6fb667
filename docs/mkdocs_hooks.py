"""What mkdocs needs beyond docs/: README and the like as pages, the reference, links to sources, an offline search."""

import os
import posixpath
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Public names: people's scripts and submissions import these.
REFERENCE = {
    "distlab.parallel": "NaiveDDP FlatDDP OverlapDDP BucketedDDP CopyEngineDDP ShardedOptimizer ZeroOptimizer FSDP",
    "distlab.comm": "RankContext rank_context",
    "distlab.testing": "check_gradients run_ranks",
    "distlab.experiment": "Experiment",
    "kernels.flash_attention": "FlashAttention2 FlashAttention2PyTorch document_bounds flash_attention",
    **{f"kernels.{name}": "" for name in (
        "rmsnorm", "layernorm", "softmax", "swiglu", "rope", "matmul", "dropout", "cross_entropy", "adamw",
        "linear_cross_entropy")},
}  # fmt: skip
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_linked: set[Path] = set()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie under docs/."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_relinked(text, ROOT / source, target)))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository's pages become links of the site."""
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, Path(page.file.abs_src_path), page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme would fetch what lets the search run without a server; ours lies in assets/."""
    worker = posixpath.relpath("assets/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return re.sub(r'<script src="https://unpkg\.com/iframe-worker/shim"', f'<script src="{worker}"', output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same on the page of errors."""
    return output_content.replace("https://unpkg.com/iframe-worker/shim", "assets/worker.js")


def on_post_build(config: MkDocsConfig) -> None:
    """Sources that pages link to lie beside the site, as text that a browser shows."""
    for path in _linked:
        target = Path(config.site_dir) / "source" / f"{path.relative_to(ROOT)}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _reference() -> str:
    lines = ["# Reference", "", "What scripts and course submissions import, and what each takes and returns."]
    for module, names in REFERENCE.items():
        lines += ["", *(f"::: {module}.{name}" for name in names.split())] if names else ["", f"::: {module}"]
    return "\n".join(lines) + "\n"


def _relinked(markdown: str, source: Path, page: str) -> str:
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
            _linked.add(path)
            # As an absolute path of the site it is left alone by mkdocs; `use_directory_urls` is off.
            return f"]({posixpath.relpath(f'source/{path.relative_to(ROOT)}.txt', posixpath.dirname(page) or '.')})"
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(page) or '.')}{match[3]}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(address, part) for part in parts)
