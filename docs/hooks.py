"""mkdocs: pages that lie in the repository's root (README is the home page), links to files that are not part of the
site, and llms.txt, the list of pages that a language model reads (llmstxt.org)."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT_PAGES = ("README.md", "DESIGN.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")
BOOST = {"tuning.md": 4}  # who searches for "K" means the draft length, not Kubernetes
_pages: list[Any] = []
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=f"{config.docs_dir}/../{name}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from a root page into docs/ and back stay links; one to another file of the repository becomes its name."""
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]
    page.meta["search"] = {"boost": BOOST.get(page.file.src_uri, 1)}
    folder = PurePosixPath(page.file.src_uri).parent
    up = "../" * (len(folder.parts) + 1)

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if page.file.src_uri in ROOT_PAGES:
            inside = target in ROOT_PAGES or target.startswith("docs/")
            return f"[{words}]({target.removeprefix('docs/')}{anchor})" if inside else f"{words} (`{target}`)"
        if target.startswith("upstream/"):
            return f"{words} (`docs/{target}`)"
        if not target.startswith(up):
            return match[0]
        name = target.removeprefix(up)
        return f"[{words}]({target.removeprefix('../')}{anchor})" if name in ROOT_PAGES else f"{words} (`{name}`)"

    return LINK.sub(link, markdown)


def on_nav(nav: Any, **_: Any) -> Any:
    _pages[:] = nav.pages
    return nav


def on_post_build(config: Any) -> None:
    lines = [f"- [{page.title}]({page.url})" for page in _pages]
    text = "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", "", *lines, ""])
    Path(config.site_dir, "llms.txt").write_text(text)
