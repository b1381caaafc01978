"""A hook of mkdocs: it adds the pages that are made from the code."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs loads this file by its path

from docs.generate.all_pages import generated_pages


@event_priority(100)  # before the plugin that orders the pages
def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files
