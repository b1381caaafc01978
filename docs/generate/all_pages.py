"""The pages that are made from the code, by their path below docs."""

from docs.generate import (
    api,
    command_line,
    errors,
    metrics,
    questions,
    results,
    schema_page,
    settings,
    statements,
)


def generated_pages() -> dict[str, str]:
    """Return all pages. No database is needed."""
    return {
        "reference/cli.md": command_line.text(),
        "reference/config.md": settings.text(),
        "reference/errors.md": errors.text(),
        "reference/metrics.md": metrics.text(),
        "reference/questions.md": questions.text(),
        "reference/schema.md": schema_page.text(),
        "reference/statements.md": statements.text(),
        **{f"reference/api/{name}.md": text for name, text in api.pages().items()},
        **{f"benchmarks/results/{name}.md": text for name, text in results.pages().items()},
    }
