"""Report: one document from all artifacts, as Markdown and as a self-contained HTML page."""
